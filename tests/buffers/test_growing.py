"""Memory that comes in slabs, is handed out, and comes back."""

from __future__ import annotations

import asyncio
import gc
import resource
import weakref
from collections.abc import AsyncIterator, Iterator

import pytest
import torch

from asynckv import (
    EntryTooLarge,
    LookupBuffer,
    Peer,
    StoreBuffer,
    TensorSpec,
    connect,
    serve,
)
from asynckv.tensors import late_views
from asynckv.tensors.paged_arena import SlabArena
from asynckv.tensors.slabs import has_slabs
from asynckv.testing import until
from asynckv.testing.expectations import only
from harness.slab_gate import SlabGate

pytestmark = pytest.mark.skipif(not has_slabs(), reason="no memory files here")

_MIB = 2**20


def _tensor(mib: int, value: int = 1) -> torch.Tensor:
    return torch.full((mib * _MIB,), value, dtype=torch.uint8)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> SlabGate:
    return SlabGate(monkeypatch)


@pytest.fixture
async def lookup() -> AsyncIterator[LookupBuffer]:
    async with LookupBuffer("64MiB", drain_s=0) as buffer:
        yield buffer


async def test_an_insert_waits_for_its_slab_and_the_loop_does_not(
    gate: SlabGate, lookup: LookupBuffer
) -> None:
    insert = asyncio.create_task(lookup.insert([1], None, _tensor(2), None, None))
    await until(gate.asked.is_set)
    assert lookup.statistics().waiting_inserts == 1
    assert not insert.done()
    gate.is_open.set()
    await insert
    assert lookup.statistics().entries == 1


async def test_what_waits_for_a_slab_can_be_selected(
    gate: SlabGate, lookup: LookupBuffer
) -> None:
    insert = asyncio.create_task(lookup.insert([1], None, _tensor(2, 7), None, None))
    await until(gate.asked.is_set)
    entry = await lookup.drop_select([1])
    assert isinstance(entry.key, torch.Tensor) and bool((entry.key == 7).all())
    await insert
    assert lookup.statistics().direct == 1
    gate.is_open.set()


async def test_inserts_that_wait_for_memory_that_is_refused_are_too_large(
    gate: SlabGate, lookup: LookupBuffer, caplog: pytest.LogCaptureFixture
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
    gate: SlabGate, lookup: LookupBuffer
) -> None:
    gate.is_open.set()
    gate.refuses = True
    with pytest.raises(EntryTooLarge):
        async with lookup.open_insert(
            [1], None, {"key": TensorSpec((32 * _MIB,), "uint8")}
        ):
            pytest.fail("there is no room")


async def test_an_insert_behind_one_that_is_too_large_now_goes_on(
    gate: SlabGate, lookup: LookupBuffer
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
    gate: SlabGate,
) -> None:
    async with StoreBuffer("64MiB") as store:
        gate.is_open.set()
        await store.put("a", _tensor(8))
        gate.refuses = True
        with pytest.raises(EntryTooLarge):
            await store.put("b", _tensor(20))
        assert await store.contains(["a"]) == (True,)
        assert store.statistics().refused_slabs == 1


async def test_a_store_grows_before_it_drops_anything(gate: SlabGate) -> None:
    gate.is_open.set()
    async with StoreBuffer("64MiB") as store:
        for key in range(5):
            await store.put(str(key), _tensor(12, key))
        assert store.statistics().evictions == 0
        assert store.statistics().keys == 5


async def test_a_kept_exception_keeps_no_memory(lookup: LookupBuffer) -> None:
    errors = []
    for _ in range(3):
        insert = asyncio.create_task(lookup.insert([1], None, _tensor(60), None, None))
        await until(lambda: lookup.statistics().used_bytes > 0)
        insert.cancel()
        try:
            await insert
        except asyncio.CancelledError as exc:
            errors.append(exc)
    assert lookup.statistics().pinned_bytes == 0


async def test_closing_does_not_wait_for_all_of_a_slab(gate: SlabGate) -> None:
    async with LookupBuffer("64MiB", drain_s=0) as lookup:
        insert = asyncio.create_task(lookup.insert([1], None, _tensor(2), None, None))
        await until(gate.asked.is_set)
        lookup.abort()
        gate.is_open.set()
    with pytest.raises(Exception, match="closed"):
        await insert


@pytest.fixture
async def warm(lookup: LookupBuffer) -> LookupBuffer:
    """One whose memory is there."""
    await lookup.insert([9], None, _tensor(60), None, None)
    await lookup.drop_select([9])
    return lookup


async def test_an_empty_tensor_is_inserted_without_a_copy(warm: LookupBuffer) -> None:
    tensor = warm.empty((40, _MIB // 4), torch.float32).fill_(3)  # not twice in 64
    assert warm.statistics().pinned_bytes == 40 * _MIB
    await warm.insert([1], None, {"0": _tensor(1), "1": tensor}, None, None)
    assert warm.statistics().used_bytes == 41 * _MIB + 8
    entry = await warm.drop_select([1])
    assert isinstance(entry.key, dict) and torch.equal(entry.key["1"], tensor)
    assert bool((entry.key["0"] == 1).all())
    del tensor
    await warm.insert([1], None, _tensor(60), None, None)


async def test_an_empty_tensor_can_be_inserted_again(warm: LookupBuffer) -> None:
    tensor = warm.empty((20 * _MIB,), torch.uint8).fill_(3)
    for _ in range(3):
        await warm.insert([1], None, tensor, tensor, None)  # one copy, one as it is
        assert warm.statistics().used_bytes == 40 * _MIB + 8
        entry = await warm.drop_select([1])
        assert isinstance(entry.value, torch.Tensor) and torch.equal(
            entry.value, tensor
        )
    assert warm.statistics().pinned_bytes == 20 * _MIB


async def test_a_cancelled_insert_leaves_an_empty_tensor_the_callers(
    warm: LookupBuffer,
) -> None:
    tensor = warm.empty((20 * _MIB,), torch.uint8).fill_(3)
    insert = asyncio.create_task(warm.insert([1], None, tensor, None, None))
    await until(lambda: warm.statistics().used_bytes > 0)
    insert.cancel()
    await asyncio.wait({insert})
    if not insert.cancelled():
        await warm.withdraw(insert.result())
    now = warm.statistics()
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
    warm: LookupBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_views, "LATE_S", 0.02)
    tensor = warm.empty((20 * _MIB,), torch.uint8)
    other = warm.empty((20 * _MIB,), torch.uint8)  # never inserted: it is no entry's
    await warm.insert([1], None, tensor, None, None)
    await warm.drop_select([1])
    await until(lambda: warm.statistics().late_views == 1)
    assert warm.statistics().pinned_bytes == 40 * _MIB
    del tensor, other


async def test_the_last_consumer_gets_the_memory_itself(warm: LookupBuffer) -> None:
    await warm.insert([1], None, {"0": _tensor(20), "1": _tensor(20)}, None, None)
    used = warm.statistics().used_bytes
    entry = await warm.drop_select([1])
    now = warm.statistics()
    assert used == 40 * _MIB + 8
    assert (now.used_bytes, now.pinned_bytes) == (0, 0)
    assert now.handed_out_bytes == 40 * _MIB
    del entry
    await until(lambda: warm.statistics().handed_out_bytes == 0)


async def test_memory_comes_back_without_a_page_fault(lookup: LookupBuffer) -> None:
    source, addresses, faults = _tensor(16), set(), 0
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        await lookup.insert([1], None, source, None, None)
        key = (await lookup.drop_select([1])).key
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        assert isinstance(key, torch.Tensor)
        addresses.add(key.data_ptr())
        del key
    assert len(addresses) == 1
    assert faults < 16 * _MIB // 4096 // 4


async def test_nothing_waits_until_the_application_forgets_what_it_took(
    warm: LookupBuffer,
) -> None:
    kept = []
    for value in range(3):
        await warm.insert([1], None, _tensor(40, value), None, None)
        kept.append((await warm.drop_select([1])).key)
    for value, tensor in enumerate(kept):
        assert isinstance(tensor, torch.Tensor) and bool((tensor == value).all())
    assert warm.statistics().handed_out_bytes == 40 * _MIB


async def test_what_a_consumer_does_to_its_tensors_reaches_nobody(
    warm: LookupBuffer,
) -> None:
    await warm.insert([1], None, _tensor(20, 1), None, None)
    first = (await warm.drop_select([1])).key
    await warm.insert([1], None, _tensor(20, 2), None, None)
    assert isinstance(first, torch.Tensor)
    first.fill_(9)
    await warm.insert([2], None, first, None, None)
    first.fill_(8)
    for tokens, value in (([1], 2), ([2], 9)):
        key = (await warm.drop_select(tokens)).key
        assert isinstance(key, torch.Tensor) and bool((key == value).all())


async def test_a_producer_that_keeps_its_tensor_shares_it_with_nobody(
    warm: LookupBuffer,
) -> None:
    tensor = warm.empty((20 * _MIB,), torch.uint8).fill_(3)
    await warm.insert([1], None, tensor, None, None)
    key = (await warm.drop_select([1])).key
    tensor.fill_(4)
    assert isinstance(key, torch.Tensor) and bool((key == 3).all())


async def test_borrowed_entries_are_copied_into_memory_that_comes_back(
    warm: LookupBuffer,
) -> None:
    await warm.insert([1], None, _tensor(20), None, None)
    async with warm.drop_select([1]) as entry:
        now = warm.statistics()
        assert (now.used_bytes, now.handed_out_bytes) == (20 * _MIB + 8, 20 * _MIB)
        del entry
    assert warm.statistics().used_bytes == 0


async def test_values_are_copied_into_memory_that_comes_back() -> None:
    async with StoreBuffer("64MiB") as store:
        await store.put("a", _tensor(60))
        assert (await store.get("a")) is not None  # nothing lies idle for it
        assert store.statistics().handed_out_bytes == 0
        await store.put("a", _tensor(20))
        assert bool((only(await store.get("a")) == 1).all())
        now = store.statistics()
        assert (now.used_bytes, now.handed_out_bytes) == (20 * _MIB, 20 * _MIB)
        evictions = store.statistics().evictions
        await store.put("b", _tensor(40))  # where there is no place
        assert store.statistics().evictions == evictions


@pytest.fixture
async def peer(lookup: LookupBuffer) -> AsyncIterator[Peer]:
    async with (
        StoreBuffer("64MiB") as store,
        serve("tcp://127.0.0.1:0", lookup=lookup, store=store) as server,
        connect(server.url, max_bytes="64MiB") as peer,
    ):
        yield peer


async def test_what_is_received_lands_in_memory_that_comes_back(
    lookup: LookupBuffer, peer: Peer
) -> None:
    addresses = []
    for value in range(4):
        await lookup.insert([1], None, _tensor(12, value), None, None)
        key = (await peer.lookup.drop_select([1])).key
        assert isinstance(key, torch.Tensor) and bool((key == value).all())
        addresses.append(key.data_ptr())
        del key
        await _slab_is_there(peer)
    assert addresses[1] == addresses[2] == addresses[3]


async def test_values_are_received_in_memory_that_comes_back(peer: Peer) -> None:
    addresses = []
    for value in range(4):
        await peer.store.put("key", _tensor(12, value))
        found = await peer.store.get("key")
        assert found is not None and bool((found == value).all())
        addresses.append(found.data_ptr())
        del found
        await _slab_is_there(peer)
    assert addresses[1] == addresses[2] == addresses[3]


async def test_a_remote_insert_sends_from_memory_that_comes_back(
    lookup: LookupBuffer, peer: Peer
) -> None:
    addresses = []
    for value in range(3):
        tensor = peer.lookup.empty((3, 4 * _MIB), torch.uint8).fill_(value)
        addresses.append(tensor.data_ptr())
        await peer.lookup.insert([1], None, tensor, None, None)
        tensor.fill_(9)  # it has left
        del tensor
        key = (await lookup.drop_select([1])).key
        assert isinstance(key, torch.Tensor) and bool((key == value).all())
        await _slab_is_there(peer)
    assert addresses[1] == addresses[2]


async def test_what_a_peer_computes_into_is_no_more_than_its_bound(peer: Peer) -> None:
    await _slab_is_wanted(peer)
    tensors = [peer.lookup.empty((12 * _MIB,), torch.uint8) for _ in range(9)]
    assert peer.memory.arena.pinned_bytes <= 64 * _MIB
    assert _slab_bytes(peer) <= 64 * _MIB
    del tensors


async def test_what_is_not_dense_is_copied_into_memory_that_comes_back(
    lookup: LookupBuffer, peer: Peer
) -> None:
    await _slab_is_wanted(peer)
    tensor = torch.arange(_MIB).view(1024, 1024).t()
    await peer.lookup.insert([1], None, tensor, None, None)
    key = (await lookup.drop_select([1])).key
    assert isinstance(key, torch.Tensor) and torch.equal(key, tensor)
    await until(lambda: peer.memory.arena.handed_out_bytes == 0)


async def test_what_was_received_waits_for_no_garbage_collector(
    lookup: LookupBuffer, peer: Peer, no_collector: None
) -> None:
    await lookup.insert([1], None, _tensor(1), None, None)
    await peer.store.put("key", _tensor(1))
    entry = await peer.lookup.drop_select([1])
    value = await peer.store.get("key")
    assert isinstance(entry.key, torch.Tensor) and value is not None
    seen = [weakref.ref(entry.key), weakref.ref(value)]
    del entry, value
    await until(lambda: [ref() for ref in seen] == [None, None])


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


async def test_what_was_received_outlives_the_connection(
    lookup: LookupBuffer,
) -> None:
    async with (
        serve("tcp://127.0.0.1:0", lookup=lookup) as server,
        connect(server.url) as peer,
    ):
        for value in range(2):
            await lookup.insert([1], None, _tensor(12, value), None, None)
            key = (await peer.lookup.drop_select([1])).key
            await _slab_is_there(peer)
    assert isinstance(key, torch.Tensor) and bool((key == 1).all())
    key.fill_(2)


def _slab_bytes(peer: Peer) -> int:
    arena = peer.memory.arena
    assert isinstance(arena, SlabArena)
    return arena.pages.nbytes


async def _slab_is_wanted(peer: Peer) -> None:
    peer.lookup.empty((_MIB,), torch.uint8)
    await _slab_is_there(peer)


async def _slab_is_there(peer: Peer) -> None:
    await until(lambda: _slab_bytes(peer) > 0)
