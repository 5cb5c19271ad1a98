from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import pytest
import torch

from asynckv import BufferClosed, EntryTooLarge, StoreBuffer, TensorSpec, WrongLoop
from asynckv.protocol.wire import digest_of
from asynckv.tensors.views import bytes_of

_MIB = 2**20


@pytest.fixture
async def store() -> AsyncIterator[StoreBuffer]:
    async with StoreBuffer("4MiB") as store:
        yield store


def value_of(number: int, nbytes: int = _MIB) -> torch.Tensor:
    return torch.full((nbytes,), number, dtype=torch.uint8)


async def until_waiting(store: StoreBuffer, count: int = 1) -> None:
    async with asyncio.timeout(5):
        while store.statistics().waiting_puts != count:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_the_digest_of_what_was_put_is_kept(store: StoreBuffer) -> None:
    await store.put("a", value_of(1))
    pinned = store.values.lookup("a", None)
    assert pinned is not None
    assert pinned.digest == digest_of(bytes_of(value_of(1)))
    store.values.release(pinned)


async def test_a_value_can_be_written_straight_into_its_region(
    store: StoreBuffer,
) -> None:
    pending = await store.values.reserve("a", TensorSpec((3,), "uint8"), None)
    pending.region.view()[:] = b"abc"
    assert await store.get("a") is None
    store.values.commit(pending, b"")
    assert (await store.get("a")).tolist() == list(b"abc")  # type: ignore[union-attr]


async def test_what_there_is_of_a_value_is_told_until_all_is_cleared(
    store: StoreBuffer,
) -> None:
    await store.put("a", value_of(1))
    told = await store.stat("a")
    assert told is not None
    assert (told.tiers, told.spec) == (("memory",), TensorSpec((_MIB,), "uint8"))
    assert await store.match_prefix(["a", "b"]) == 1
    assert await store.clear() == 1
    assert await store.stat("a") is None
    assert await store.match_prefix(["a", "b"]) == 0


async def test_a_put_waits_for_what_is_read(store: StoreBuffer) -> None:
    await store.put("a", value_of(1, 3 * _MIB))
    waits = store.statistics().room_waits
    pinned = store.values.lookup("a", None)
    assert pinned is not None
    assert (
        store.values.reserve_nowait("b", TensorSpec((2 * _MIB,), "uint8"), None) is None
    )
    put = asyncio.create_task(store.put("b", value_of(2, 2 * _MIB)))
    await until_waiting(store)
    store.values.release(pinned)
    await put
    assert await store.contains(["a", "b"]) == (False, True)
    assert store.statistics().room_waits == waits + 1


async def test_a_wait_for_room_tells_who_waits_for_what(
    store: StoreBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "asynckv")
    pending = await store.values.reserve("a", TensorSpec((4 * _MIB,), "uint8"), None)
    put = asyncio.create_task(store.put("b", value_of(2, 8)))
    await until_waiting(store)
    store.values.discard(pending)
    await put
    assert "put of 'b' (8 bytes) waits for room" in caplog.text


async def test_room_given_in_the_moment_of_closing_is_given_back(
    store: StoreBuffer,
) -> None:
    pending = await store.values.reserve("a", TensorSpec((4 * _MIB,), "uint8"), None)
    put = asyncio.create_task(store.put("b", value_of(2)))
    await until_waiting(store)
    store.values.discard(pending)
    store.abort()
    with pytest.raises(BufferClosed):
        await put
    assert store.statistics().used_bytes == 0


@pytest.mark.parametrize("fails", [False, True])
async def test_what_is_pinned_is_not_dropped_for_room_until_it_is_left(
    store: StoreBuffer, fails: bool
) -> None:
    await store.put("a", value_of(1, 3 * _MIB))
    with contextlib.suppress(KeyError):
        async with store.pin(["a", "b"]) as found:
            putting = asyncio.create_task(store.put("c", value_of(2, 2 * _MIB)))
            await until_waiting(store)
            if fails:
                raise KeyError
    assert found == (True, False)
    await putting
    assert await store.contains(["a", "c"]) == (False, True)


async def test_what_could_never_fit_is_refused_even_with_a_line(
    store: StoreBuffer,
) -> None:
    pending = await store.values.reserve("a", TensorSpec((4 * _MIB,), "uint8"), None)
    with pytest.raises(EntryTooLarge, match="5242880 bytes"):
        await store.put("b", value_of(1, 5 * _MIB))
    store.values.discard(pending)


async def test_it_counts_what_happens(store: StoreBuffer) -> None:
    await store.put("a", value_of(1))
    await store.put("b", value_of(2, 4 * _MIB))
    await store.get("b")
    await store.get("a")
    await store.delete("b")
    found = store.statistics()
    assert (found.puts, found.evictions, found.deletes) == (2, 1, 1)
    assert (found.hits, found.misses, found.keys) == (1, 1, 0)
    assert (found.used_bytes, found.peak_bytes) == (0, 4 * _MIB)
    assert (found.max_bytes, found.oldest_put_wait_s) == (4 * _MIB, 0.0)


@pytest.mark.parametrize("key", ["k" * 513, 7])
async def test_what_cannot_be_a_key_is_refused(store: StoreBuffer, key: str) -> None:
    for call in (
        store.put(key, value_of(1, 8)),
        store.put(key, None),
        store.get(key),
        store.contains([key]),
    ):
        with pytest.raises((TypeError, ValueError), match="key"):
            await call


async def test_memory_that_nothing_can_land_in_is_refused_also_on_a_miss(
    store: StoreBuffer,
) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        await store.get("nothing", value_of(0)[::2])


async def test_it_may_be_closed_twice(store: StoreBuffer) -> None:
    await store.aclose()
    await store.aclose()
    store.abort()


def test_it_belongs_to_the_loop_that_used_it_first() -> None:
    store = StoreBuffer("1MiB")
    asyncio.run(store.put("a", value_of(1, 8)))
    with pytest.raises(WrongLoop):
        asyncio.run(store.get("a"))


@pytest.mark.usefixtures("no_slabs")
async def test_a_put_that_finds_no_memory_leaves_nothing() -> None:
    async with StoreBuffer(2**49) as store:
        with pytest.raises(EntryTooLarge, match="no memory for"):
            await store.put("a", torch.zeros(1, dtype=torch.uint8).expand(2**48))
        await store.put("a", value_of(1))
        assert store.statistics().used_bytes == _MIB


async def test_a_store_of_many_values_has_let_go_of_all_when_it_is_closed(
    store: StoreBuffer,
) -> None:
    for number in range(600):
        pending = await store.values.reserve(
            f"{number}", TensorSpec((1,), "uint8"), None
        )
        store.values.commit(pending, b"")
    await store.aclose()
    assert store.statistics().used_bytes == 0


@pytest.mark.parametrize("asked", ["contains", "match_prefix"])
async def test_others_have_their_turn_while_many_keys_are_looked_for(
    store: StoreBuffer, asked: str
) -> None:
    for key in ("0", "2999"):
        await store.put(key, value_of(1, 8))
    keys, turns = [f"{number}" for number in range(3000)], 0
    asking = asyncio.create_task(getattr(store, asked)(keys))
    while not asking.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 3000 // 512
    there = (True, *[False] * 2998, True)
    assert asking.result() == (there if asked == "contains" else 1)
