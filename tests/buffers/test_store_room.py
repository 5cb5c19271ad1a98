from __future__ import annotations

import asyncio

import pytest

from asynckv.buffers.values import PendingPut, StoredValues
from asynckv.errors import BufferClosed
from asynckv.tensors.arena import HeapArena
from asynckv.testing import until_blocked
from asynckv.types import TensorSpec


def _spec(nbytes: int) -> TensorSpec:
    return TensorSpec((nbytes,), "uint8")


class Store:
    """Values of 100 bytes, all of which a put has taken."""

    def __init__(self) -> None:
        self.values = StoredValues(HeapArena(100), lambda: None)
        pending = self.reserve_nowait(100)
        assert pending is not None
        self.taken = pending

    def reserve_nowait(self, nbytes: int) -> PendingPut | None:
        return self.values.reserve_nowait("key", _spec(nbytes), None)

    def reserve(self, nbytes: int) -> asyncio.Task[PendingPut]:
        reserving = self.values.reserve("key", _spec(nbytes), None)
        return asyncio.create_task(reserving)


async def test_room_is_given_in_the_order_of_the_calls() -> None:
    store = Store()
    tasks = [store.reserve(nbytes) for nbytes in (90, 20, 5)]
    await until_blocked(*tasks)
    store.values.discard(store.taken)
    first = await tasks[0]
    assert not tasks[2].done()
    store.values.discard(first)
    for task in tasks[1:]:
        store.values.discard(await task)
    assert store.values.counters.room_waits == 3


async def test_who_finds_room_has_it_at_once() -> None:
    store = Store()
    store.values.discard(store.taken)
    store.values.discard(await store.reserve(100))


async def test_nobody_overtakes_the_line() -> None:
    store = Store()
    waiting = store.reserve(10)
    await until_blocked(waiting)
    assert store.reserve_nowait(0) is None
    now_s = asyncio.get_running_loop().time()
    assert 2.0 < store.values.room.longest_wait_s(now_s + 3.0) < 4.0
    store.values.discard(store.taken)
    store.values.discard(await waiting)
    assert store.values.room.longest_wait_s(now_s) == 0.0


async def test_who_is_cancelled_lets_the_next_go_on() -> None:
    store = Store()
    store.values.discard(store.taken)
    half = store.reserve_nowait(50)
    tasks = [store.reserve(80), store.reserve(50)]
    await until_blocked(*tasks)
    tasks[0].cancel()
    pending = await tasks[1]
    assert half is not None
    for put in (half, pending):
        store.values.discard(put)
    assert len(store.values.room) == 0


async def test_what_a_put_got_as_it_was_cancelled_is_free_again() -> None:
    store = Store()
    waiting = store.reserve(100)
    await until_blocked(waiting)
    store.values.discard(store.taken)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    assert store.reserve_nowait(100) is not None


async def test_a_wait_ends_with_the_ledger() -> None:
    store = Store()
    waiting = store.reserve(10)
    await until_blocked(waiting)
    store.values.close()
    with pytest.raises(BufferClosed):
        await waiting
    await store.values.room.aclose()
    assert len(store.values.room) == 0
