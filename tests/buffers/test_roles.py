from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import torch

from asynckv import LookupBuffer, TensorSpec, WrongRole
from asynckv.buffers.roles import LookupByRole

KEY = torch.ones(3)
SPECS = {"key": TensorSpec((3,), "float32")}


@pytest.fixture
async def own() -> AsyncIterator[LookupBuffer]:
    async with LookupBuffer("1MiB", drain_s=0) as buffer:
        yield buffer


@pytest.fixture
async def others() -> AsyncIterator[LookupBuffer]:
    async with LookupBuffer("1MiB", drain_s=0) as buffer:
        yield buffer


async def test_a_producer_inserts_and_does_not_select(own: LookupBuffer) -> None:
    lookup = LookupByRole(own, None)
    entry_id = await lookup.insert([1, 2], None, KEY, None, None)
    assert await lookup.peek([1, 2]) == 2
    assert lookup.empty((3, 2), torch.float32).shape == (3, 2)
    with pytest.raises(WrongRole, match="drop_select is a kv_consumer's verb"):
        lookup.drop_select([1])
    with pytest.raises(WrongRole, match="open_drop_select"):
        lookup.open_drop_select([1])
    assert await lookup.withdraw(entry_id)


async def test_a_consumer_selects_and_does_not_insert(others: LookupBuffer) -> None:
    lookup = LookupByRole(None, others)
    await others.insert([1], None, KEY, None, None)
    for call in (
        lambda: lookup.insert([1], None, KEY, None, None),
        lambda: lookup.taken("id"),
        lambda: lookup.withdraw("id"),
    ):
        with pytest.raises(WrongRole, match="is a kv_producer's verb"):
            await call()
    with pytest.raises(WrongRole, match="open_insert"):
        lookup.open_insert([1], None, SPECS)
    with pytest.raises(WrongRole, match="empty"):
        lookup.empty((3,), torch.float32)
    assert (await lookup.drop_select([1])).entry_id


async def test_who_is_both_inserts_here_and_selects_there(
    own: LookupBuffer, others: LookupBuffer
) -> None:
    lookup = LookupByRole(own, others)
    await lookup.insert([1], None, KEY, None, None)
    assert (await lookup.peek([1]), await own.peek([1])) == (0, 1)
    await others.insert([1, 2], None, KEY, None, None)
    assert (await lookup.drop_select([1, 2], min_matched_tokens=2)).matched_tokens == 2
    assert lookup.statistics() == own.statistics()


async def test_streaming_goes_the_same_ways(
    own: LookupBuffer, others: LookupBuffer
) -> None:
    for lookup in (LookupByRole(own, None), LookupByRole(others, None)):
        async with lookup.open_insert([1], None, SPECS, entry_id="e") as writer:
            await writer.put("key", KEY)
    async with LookupByRole(own, others).open_drop_select([1]) as stream:
        assert torch.equal(await stream.wait_for("key"), KEY)
    await LookupByRole(others, None).taken("e")
    assert await own.peek([1]) == 1
    assert await own.withdraw("e")


async def test_statistics_are_those_of_the_only_buffer(others: LookupBuffer) -> None:
    assert LookupByRole(None, others).statistics() == others.statistics()


@pytest.mark.parametrize("has", ["own", "others", "both"])
@pytest.mark.parametrize("close", ["aclose", "abort"])
async def test_closing_closes_what_there_is(
    own: LookupBuffer, others: LookupBuffer, has: str, close: str
) -> None:
    lookup = LookupByRole(
        None if has == "others" else own, None if has == "own" else others
    )
    if close == "aclose":
        await lookup.aclose()
    else:
        lookup.abort()
    assert (own.is_closed, others.is_closed) == (has != "others", has != "own")
