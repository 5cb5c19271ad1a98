from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.store import StoreBuffer
from asynckv.errors import EntryTooLarge
from asynckv.tensors import slab_regions
from asynckv.tensors.slabs import has_slabs
from asynckv.testing.blocked import until
from asynckv.types import TensorSpec

pytestmark = pytest.mark.skipif(not has_slabs(), reason="no memory files here")

_MIB = 2**20


def _tensor(mib: int, value: int = 1) -> torch.Tensor:
    return torch.full((mib * _MIB,), value, dtype=torch.uint8)


class Gate:
    """Lets slabs be allocated, or refuses them, when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refuses = False
        self.is_open = threading.Event()
        self.asked = threading.Event()
        self._allocate: Callable[[int, int, int], None] = os.posix_fallocate
        monkeypatch.setattr(os, "posix_fallocate", self)

    def __call__(self, fd: int, start: int, nbytes: int) -> None:
        self.asked.set()
        self.is_open.wait(10)
        if self.refuses:
            raise OSError(errno.ENOMEM, "no memory")
        self._allocate(fd, start, nbytes)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture
async def lookup() -> AsyncIterator[LookupBuffer]:
    async with LookupBuffer("64MiB", drain_s=0) as buffer:
        yield buffer


async def test_an_insert_waits_for_its_slab_and_the_loop_does_not(
    gate: Gate, lookup: LookupBuffer
) -> None:
    insert = asyncio.create_task(lookup.insert([1], None, _tensor(2), None, None))
    await until(gate.asked.is_set)
    assert lookup.statistics().waiting_inserts == 1
    assert not insert.done()
    gate.is_open.set()
    await insert
    assert lookup.statistics().entries == 1


async def test_what_waits_for_a_slab_can_be_selected(
    gate: Gate, lookup: LookupBuffer
) -> None:
    insert = asyncio.create_task(lookup.insert([1], None, _tensor(2, 7), None, None))
    await until(gate.asked.is_set)
    entry = await lookup.drop_select([1])
    assert isinstance(entry.key, torch.Tensor) and bool((entry.key == 7).all())
    await insert
    assert lookup.statistics().direct == 1
    gate.is_open.set()


async def test_inserts_that_wait_for_memory_that_is_refused_are_too_large(
    gate: Gate, lookup: LookupBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    gate.is_open.set()
    await lookup.insert([1], None, _tensor(8), None, None)
    gate.refuses = True
    with pytest.raises(EntryTooLarge) as raised:
        await lookup.insert([2], None, _tensor(20), None, None)
    assert raised.value.max_bytes == 16 * _MIB
    with pytest.raises(EntryTooLarge, match="the system refused"):
        await lookup.insert([3], None, _tensor(20), None, None)
    await lookup.insert([4], None, _tensor(7), None, None)
    assert lookup.statistics().refused_slabs == 1
    assert [r.levelname for r in caplog.records if "memory" in r.message] == ["WARNING"]


async def test_a_writer_that_waits_for_refused_memory_is_told(
    gate: Gate, lookup: LookupBuffer
) -> None:
    gate.is_open.set()
    gate.refuses = True
    with pytest.raises(EntryTooLarge):
        async with lookup.open_insert(
            [1], None, {"key": TensorSpec((32 * _MIB,), "uint8")}
        ):
            pytest.fail("there is no room")


async def test_an_insert_behind_one_that_is_too_large_now_goes_on(
    gate: Gate, lookup: LookupBuffer
) -> None:
    gate.is_open.set()
    await lookup.insert([1], None, _tensor(16), None, None)
    gate.refuses = True
    large = asyncio.create_task(lookup.insert([2], None, _tensor(20), None, None))
    small = asyncio.create_task(lookup.insert([3], None, _tensor(10), None, None))
    with pytest.raises(EntryTooLarge):
        await large
    await lookup.drop_select([1])
    await small


async def test_puts_that_wait_for_memory_that_is_refused_are_too_large(
    gate: Gate,
) -> None:
    async with StoreBuffer("64MiB") as store:
        gate.is_open.set()
        await store.put("a", _tensor(8))
        gate.refuses = True
        with pytest.raises(EntryTooLarge):
            await store.put("b", _tensor(20))
        assert await store.contains(["a"]) == (True,)
        assert store.statistics().refused_slabs == 1


async def test_a_store_grows_before_it_drops_anything(gate: Gate) -> None:
    gate.is_open.set()
    async with StoreBuffer("64MiB") as store:
        for key in range(5):
            await store.put(str(key), _tensor(12, key))
        assert store.statistics().evictions == 0
        assert store.statistics().keys == 5


async def test_a_kept_exception_keeps_no_memory(lookup: LookupBuffer) -> None:
    errors = []
    for _ in range(10):
        insert = asyncio.create_task(lookup.insert([1], None, _tensor(60), None, None))
        await until(lambda: lookup.statistics().used_bytes > 0)
        insert.cancel()
        try:
            await insert
        except asyncio.CancelledError as exc:
            errors.append(exc)
    assert lookup.statistics().pinned_bytes == 0


async def test_closing_does_not_wait_for_all_of_a_slab(gate: Gate) -> None:
    async with LookupBuffer("64MiB", drain_s=0) as lookup:
        insert = asyncio.create_task(lookup.insert([1], None, _tensor(2), None, None))
        await until(gate.asked.is_set)
        lookup.abort()
        gate.is_open.set()
    with pytest.raises(Exception, match="closed"):
        await insert


async def _arena_is_there(lookup: LookupBuffer) -> None:
    await lookup.insert([9], None, _tensor(60), None, None)
    await lookup.drop_select([9])


async def test_an_empty_tensor_is_inserted_without_a_copy(lookup: LookupBuffer) -> None:
    await _arena_is_there(lookup)
    tensor = lookup.empty((40, _MIB // 4), torch.float32).fill_(3)  # not twice in 64
    assert lookup.statistics().pinned_bytes == 40 * _MIB
    await lookup.insert([1], None, {"0": _tensor(1), "1": tensor}, None, None)
    assert lookup.statistics().used_bytes == 41 * _MIB + 8
    entry = await lookup.drop_select([1])
    assert isinstance(entry.key, dict) and torch.equal(entry.key["1"], tensor)
    assert bool((entry.key["0"] == 1).all())
    del tensor
    await lookup.insert([1], None, _tensor(60), None, None)


async def test_an_empty_tensor_can_be_inserted_again(lookup: LookupBuffer) -> None:
    await _arena_is_there(lookup)
    tensor = lookup.empty((20 * _MIB,), torch.uint8).fill_(3)
    for _ in range(3):
        await lookup.insert([1], None, tensor, tensor, None)  # one copy, one as it is
        assert lookup.statistics().used_bytes == 40 * _MIB + 8
        entry = await lookup.drop_select([1])
        assert isinstance(entry.value, torch.Tensor) and torch.equal(
            entry.value, tensor
        )
    assert lookup.statistics().pinned_bytes == 20 * _MIB


async def test_a_cancelled_insert_leaves_an_empty_tensor_the_callers(
    lookup: LookupBuffer,
) -> None:
    await _arena_is_there(lookup)
    tensor = lookup.empty((20 * _MIB,), torch.uint8).fill_(3)
    insert = asyncio.create_task(lookup.insert([1], None, tensor, None, None))
    await until(lambda: lookup.statistics().used_bytes > 0)
    insert.cancel()
    await asyncio.wait({insert})
    if not insert.cancelled():
        await lookup.withdraw(insert.result())
    now = lookup.statistics()
    assert (now.used_bytes, now.pinned_bytes) == (0, 20 * _MIB)
    assert bool((tensor == 3).all())


async def test_an_empty_tensor_without_room_is_an_ordinary_one(
    lookup: LookupBuffer,
) -> None:
    tensor = lookup.empty((10 * _MIB,), torch.uint8).fill_(4)
    assert lookup.statistics().pinned_bytes == 0
    await lookup.insert([1], None, tensor, None, None)
    entry = await lookup.drop_select([1])
    assert isinstance(entry.key, torch.Tensor) and torch.equal(entry.key, tensor)


async def test_a_view_of_what_has_left_is_said_when_it_is_kept_long(
    lookup: LookupBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab_regions, "LATE_S", 0.02)
    await _arena_is_there(lookup)
    tensor = lookup.empty((20 * _MIB,), torch.uint8)
    other = lookup.empty((20 * _MIB,), torch.uint8)  # never inserted: it is no entry's
    await lookup.insert([1], None, tensor, None, None)
    await lookup.drop_select([1])
    await until(lambda: lookup.statistics().late_views == 1)
    assert lookup.statistics().pinned_bytes == 40 * _MIB
    del tensor, other
