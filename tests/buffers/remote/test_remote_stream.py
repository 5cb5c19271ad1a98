from __future__ import annotations

import asyncio

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.errors import EntryAborted, LeaseLost, PeerLost
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.pairs import Peers
from asynckv.types import TensorSpec

MIB = 2**20
SPECS = {"0.key": TensorSpec((MIB,), "uint8"), "1.key": TensorSpec((MIB,), "uint8")}
ONES = torch.ones(MIB, dtype=torch.uint8)


async def test_an_entry_whose_writer_fails_before_anything_came_is_not_shown(
    peers: Peers, local: LookupBuffer
) -> None:
    async def read() -> str:
        async with peers.consumer.lookup.open_drop_select([1]) as stream:
            return stream.entry_id

    reading = asyncio.create_task(read())
    await until(lambda: local.statistics().waiting_selects == 1)
    with pytest.raises(LookupError):
        async with local.open_insert([1], None, SPECS):
            raise LookupError
    await until(lambda: local.statistics().waiting_selects == 1)
    await local.insert([1], None, None, None, None, entry_id="next")
    assert await reading == "next"


async def test_leaving_early_stops_what_is_on_its_way_and_frees_the_budget(
    peers: Peers, local: LookupBuffer
) -> None:
    async with local.open_insert([1], None, SPECS) as writer:
        await writer.put("1.key", ONES)
        into = {"0.key": torch.zeros(MIB, dtype=torch.uint8)}
        async with peers.consumer.lookup.open_drop_select([1], into=into) as stream:
            assert torch.equal(await stream.wait_for("1.key"), ONES)
            assert peers.consumer.budget.used_bytes == MIB
        assert peers.consumer.budget.used_bytes == 0
        payload = (await peers.consumer.link()).payload
        assert not payload._table.is_waiting  # type: ignore[attr-defined]
        await writer.put("0.key", ONES)
    assert not into["0.key"].any() and local.statistics().entries == 0


async def test_a_link_lost_in_mid_stream_is_a_lost_peer(
    peers: Peers, local: LookupBuffer
) -> None:
    async with local.open_insert([1], None, SPECS) as writer:
        await writer.put("0.key", ONES)
        with pytest.raises(PeerLost):
            async with peers.consumer.lookup.open_drop_select([1]) as stream:
                await anext(stream)
                (await peers.consumer.link()).abort()
                await anext(stream)
        await writer.put("1.key", ONES)
        async with peers.consumer.lookup.open_drop_select([1]) as stream:
            names = [(await anext(stream))[0] for _ in range(2)]
            assert sorted(names) == list(SPECS) and stream.attempt == 2


async def test_a_stream_that_was_left_gives_nothing_more(
    peers: Peers, local: LookupBuffer
) -> None:
    await local.insert([1], None, torch.ones(3), None, None)
    async with peers.consumer.lookup.open_drop_select([1]) as stream:
        with pytest.raises(KeyError):
            await stream.wait_for("hidden")
        assert [name async for name, _ in stream] == ["key"]
    with pytest.raises(RuntimeError, match="left already"):
        await stream.wait_for("key")
    with pytest.raises(RuntimeError, match="left already"):
        await anext(stream)


async def test_the_iteration_ends_with_the_commit(
    peers: Peers, local: LookupBuffer
) -> None:
    writing = local.open_insert([1], None, {"key": SPECS["0.key"]})
    writer = await writing.__aenter__()
    await writer.put("key", ONES)
    async with peers.consumer.lookup.open_drop_select([1]) as stream:
        await anext(stream)
        end = asyncio.create_task(anext(stream, None))
        await until_blocked(end)
        assert not end.done()
        await writing.__aexit__(None, None, None)
        assert await end is None


async def test_what_has_landed_outlives_a_writer_that_fails(
    peers: Peers, local: LookupBuffer
) -> None:
    with pytest.raises(LookupError):
        async with local.open_insert([1], None, SPECS) as writer:
            await writer.put("0.key", ONES)
            leased = peers.consumer.lookup.open_drop_select([1])
            stream = await leased.__aenter__()
            await stream.wait_for("0.key")
            raise LookupError
    with pytest.raises(EntryAborted, match="producer"):
        await stream.wait_for("1.key")
    assert torch.equal(await stream.wait_for("0.key"), ONES)
    with pytest.raises(LeaseLost):
        await leased.__aexit__(None, None, None)
    assert local.statistics().entries == 0
