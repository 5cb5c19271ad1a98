from __future__ import annotations

import gc
import resource
import weakref
from collections.abc import AsyncIterator, Iterator

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import Peer, connect
from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.tensors.paged_arena import SlabArena
from asynckv.tensors.slabs import has_slabs
from asynckv.testing.blocked import until

pytestmark = pytest.mark.skipif(not has_slabs(), reason="no memory files here")

_MIB = 2**20


def _tensor(mib: int, value: int = 1) -> torch.Tensor:
    return torch.full((mib * _MIB,), value, dtype=torch.uint8)


@pytest.fixture
async def lookup() -> AsyncIterator[LookupBuffer]:
    async with LookupBuffer("64MiB", drain_s=0) as buffer:
        yield buffer


async def _arena_is_there(lookup: LookupBuffer) -> None:
    await lookup.insert([9], None, _tensor(60), None, None)
    await lookup.drop_select([9])


async def test_the_last_consumer_gets_the_memory_itself(lookup: LookupBuffer) -> None:
    await _arena_is_there(lookup)
    await lookup.insert([1], None, {"0": _tensor(20), "1": _tensor(20)}, None, None)
    used = lookup.statistics().used_bytes
    entry = await lookup.drop_select([1])
    now = lookup.statistics()
    assert used == 40 * _MIB + 8
    assert (now.used_bytes, now.pinned_bytes) == (0, 0)
    assert now.handed_out_bytes == 40 * _MIB
    del entry
    await until(lambda: lookup.statistics().handed_out_bytes == 0)


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
    lookup: LookupBuffer,
) -> None:
    await _arena_is_there(lookup)
    kept = []
    for value in range(5):
        await lookup.insert([1], None, _tensor(40, value), None, None)
        kept.append((await lookup.drop_select([1])).key)
    for value, tensor in enumerate(kept):
        assert isinstance(tensor, torch.Tensor) and bool((tensor == value).all())
    assert lookup.statistics().handed_out_bytes == 40 * _MIB


async def test_what_a_consumer_does_to_its_tensors_reaches_nobody(
    lookup: LookupBuffer,
) -> None:
    await _arena_is_there(lookup)
    await lookup.insert([1], None, _tensor(20, 1), None, None)
    first = (await lookup.drop_select([1])).key
    await lookup.insert([1], None, _tensor(20, 2), None, None)
    assert isinstance(first, torch.Tensor)
    first.fill_(9)
    await lookup.insert([2], None, first, None, None)
    first.fill_(8)
    for tokens, value in (([1], 2), ([2], 9)):
        key = (await lookup.drop_select(tokens)).key
        assert isinstance(key, torch.Tensor) and bool((key == value).all())


async def test_a_producer_that_keeps_its_tensor_shares_it_with_nobody(
    lookup: LookupBuffer,
) -> None:
    await _arena_is_there(lookup)
    tensor = lookup.empty((20 * _MIB,), torch.uint8).fill_(3)
    await lookup.insert([1], None, tensor, None, None)
    key = (await lookup.drop_select([1])).key
    tensor.fill_(4)
    assert isinstance(key, torch.Tensor) and bool((key == 3).all())


async def test_borrowed_entries_are_copied_into_memory_that_comes_back(
    lookup: LookupBuffer,
) -> None:
    await _arena_is_there(lookup)
    await lookup.insert([1], None, _tensor(20), None, None)
    async with lookup.drop_select([1]) as entry:
        now = lookup.statistics()
        assert (now.used_bytes, now.handed_out_bytes) == (20 * _MIB + 8, 20 * _MIB)
        del entry
    assert lookup.statistics().used_bytes == 0


async def test_values_are_copied_into_memory_that_comes_back() -> None:
    async with StoreBuffer("64MiB") as store:
        await store.put("a", _tensor(60))
        assert (await store.get("a")) is not None  # nothing lies idle for it
        assert store.statistics().handed_out_bytes == 0
        await store.put("a", _tensor(20))
        value = await store.get("a")
        assert value is not None and bool((value == 1).all())
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
