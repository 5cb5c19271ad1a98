"""Values in one process's memory of a GPU, put and got by a peer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import pytest
import torch

from asynckv.buffers.getting import Getting
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote import connect
from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.errors import ChecksumError, GPUFailed
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.links.gpu_link import GpuPathLost
from asynckv.tensors.cuda import DeviceMemory
from asynckv.testing.blocked import until, until_blocked
from asynckv.testing.expectations import is_same, only
from asynckv.testing.fake_devices import fake_device_of
from asynckv.testing.fake_gpus import FakeGpus
from asynckv.testing.fake_gpus.streams import Delay
from asynckv.testing.gpu_stores import GpuStores, open_gpu_stores
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.testing.store_checks.values import StoreCheck
from asynckv.testing.store_conformance import STORE_CHECKS

pytestmark = pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles")

WAYS: Final[Mapping[str, Mapping[str, Any]]] = {
    "cuda_ipc": {},
    "nccl": {"theirs": 1},
    "inline": {"url": "?payload=inline"},
    "lanes": {"device": None},
}
SMALL = 64 * 1024


@pytest.fixture(params=WAYS)
async def way(
    request: pytest.FixtureRequest, two_gpus: FakeGpus
) -> AsyncIterator[GpuStores]:
    """By each way from the store's GPU to the peer."""
    async with open_gpu_stores(two_gpus, **WAYS[request.param]) as pair:
        yield pair


@pytest.fixture
async def pair(gpus: FakeGpus) -> AsyncIterator[GpuStores]:
    async with open_gpu_stores(gpus) as pair:
        yield pair


@pytest.fixture
async def apart(two_gpus: FakeGpus) -> AsyncIterator[GpuStores]:
    async with open_gpu_stores(two_gpus, theirs=1) as pair:
        yield pair


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
async def test_a_served_store_on_a_gpu_keeps_what_every_one_keeps(
    way: GpuStores, check: StoreCheck
) -> None:
    await check(way.peer.store, way.store)


async def test_a_value_is_copied_from_one_process_to_the_other_on_the_gpu(
    pair: GpuStores,
) -> None:
    assert pair.peer.transport == "cuda_ipc"
    await pair.store.put("key", pair.ours.tensor(noise(MIB)))
    value = await pair.peer.store.get("key")
    assert value is not None and value.is_cuda and is_same(value, noise(MIB))
    assert not pair.peer.budget.used_bytes
    await until(lambda: not pair.store.sharing.mapped_by)


async def test_a_value_goes_from_gpu_to_gpu(apart: GpuStores) -> None:
    assert apart.peer.transport == "nccl" and not apart.has_moved
    await apart.store.put("key", apart.ours.tensor(noise(MIB)))
    value = await apart.peer.store.get("key")
    assert value is not None and str(value.device) == "cuda:1"
    assert is_same(value, noise(MIB)) and apart.has_moved
    assert not apart.peer.budget.used_bytes


async def test_a_peer_puts_into_memory_of_a_gpu(way: GpuStores) -> None:
    for nbytes in (8, MIB):
        await way.peer.store.put("key", way.theirs.tensor(noise(nbytes, 2)))
        value = await way.store.get("key")
        assert value is not None and value.is_cuda and is_same(value, noise(nbytes, 2))
    pinned = way.store.lookup("key", None)
    assert pinned is not None and pinned.region.is_on_device
    way.store.release(pinned)


async def test_small_values_get_to_and_from_a_gpu_that_holds_many_of_them(
    way: GpuStores,
) -> None:
    keys = [str(number) for number in range(4 * MIB // SMALL + 4)]
    for number, key in enumerate(keys):
        await way.peer.store.put(key, noise(SMALL, number))
    for number, key in enumerate(keys):
        value = await way.peer.store.get(key)
        assert is_same(value, noise(SMALL, number)), key


async def test_what_rides_gets_from_a_gpu_that_holds_many_of_them(
    way: GpuStores,
) -> None:
    for number in range(4 * MIB // SMALL):
        await way.store.put(str(number), noise(SMALL, 1))
    await way.peer.store.put("key", noise(8000, 2))
    pinned = way.store.lookup("key", None)
    assert pinned is not None and pinned.region.is_on_device
    way.store.release(pinned)
    assert is_same(await way.peer.store.get("key"), noise(8000, 2))


@pytest.mark.parametrize("nbytes", [8, MIB])
async def test_a_value_lands_in_memory_of_the_gpu_that_the_caller_has(
    two_gpus: FakeGpus, nbytes: int
) -> None:
    for way in ("cuda_ipc", "nccl", "inline"):
        async with open_gpu_stores(two_gpus, **WAYS[way]) as pair:
            await pair.store.put("key", noise(nbytes))
            into = pair.theirs.tensor(torch.zeros(nbytes, dtype=torch.uint8))
            assert await pair.peer.store.get("key", into=into) is into
            assert is_same(into, noise(nbytes))


async def test_a_place_is_not_written_before_its_owner_is_done(
    apart: GpuStores,
) -> None:
    await apart.store.put("key", noise(MIB))
    into = apart.theirs.tensor(torch.zeros(MIB, dtype=torch.uint8))
    apart.theirs.tensors.stream(1).add(Delay(50))
    getting = asyncio.create_task(apart.peer.store.get("key", into=into))
    await until_blocked(getting)
    assert await getting is into and is_same(into, noise(MIB))


@pytest.mark.parametrize("theirs", [0, 1])
async def test_bytes_that_changed_at_an_edge_are_refused(
    two_gpus: FakeGpus, theirs: int
) -> None:
    async with open_gpu_stores(two_gpus, theirs=theirs) as pair:
        await pair.store.put("key", noise(MIB))
        pinned = pair.store.lookup("key", None)
        assert pinned is not None
        place = pinned.region.place(pinned.spec)
        assert isinstance(place, DeviceMemory)
        pair.ours.process.cuda.view(place)[0] ^= 1
        del place
        pair.store.release(pinned)
        with pytest.raises(ChecksumError):
            await pair.peer.store.get("key")
        await pair.peer.store.put("key", noise(MIB, 2))
        assert is_same(await pair.peer.store.get("key"), noise(MIB, 2))


@pytest.mark.parametrize("digest", ["full", "off"])
async def test_a_value_has_whatever_digest_was_asked_for(
    two_gpus: FakeGpus, digest: str
) -> None:
    for theirs in (0, 1):
        async with open_gpu_stores(two_gpus, theirs=theirs, digest=digest) as pair:
            await pair.peer.store.put("key", noise(MIB))
            assert is_same(await pair.peer.store.get("key"), noise(MIB))


async def test_a_value_that_is_replaced_while_it_is_read_is_the_old_one(
    pair: GpuStores,
) -> None:
    await pair.store.put("key", noise(MIB, 1))
    pair.theirs.tensors.stream(0).add(Delay(30))
    into = pair.theirs.tensor(torch.zeros(MIB, dtype=torch.uint8))
    getting = asyncio.create_task(pair.peer.store.get("key", into=into))
    await until(lambda: bool(pair.store.sharing.mapped_by))
    await pair.store.put("key", noise(MIB, 2))
    await getting
    assert is_same(into, noise(MIB, 1))
    assert is_same(await pair.peer.store.get("key"), noise(MIB, 2))


async def test_who_waits_for_a_value_that_its_gpu_has_lost_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gpus: FakeGpus
) -> None:
    def fail(*anything: object) -> None:
        raise GPUFailed("it has fallen off the bus")

    async with open_gpu_stores(gpus, device=None) as pair:
        await pair.store.put("key", noise(MIB))
        with monkeypatch.context() as patch:
            patch.setattr(pair.ours.process.cuda, "copy", fail)
            with pytest.raises(GPUFailed, match="off the bus"):
                await pair.peer.store.get("key")
            with pytest.raises(GPUFailed, match="off the bus"):
                await pair.peer.store.put("key", noise(MIB, 2))
        assert is_same(await pair.peer.store.get("key"), noise(MIB))
    assert "cannot be read from its GPU" in caplog.text
    caplog.clear()


async def test_a_way_that_is_lost_leaves_host_memory(
    apart: GpuStores, caplog: pytest.LogCaptureFixture
) -> None:
    await apart.store.put("key", noise(MIB))
    into = apart.theirs.tensor(torch.zeros(MIB, dtype=torch.uint8))
    apart.theirs.tensors.stream(1).add(Delay(50))
    getting = asyncio.create_task(apart.peer.store.get("key", into=into))
    await until_blocked(getting)
    way = apart.peer.ways.arrivals(apart.peer._linked())
    assert way is not None
    way.gpus._on_lost(GPUFailed("it has fallen off the bus"))
    assert await getting is into and is_same(into, noise(MIB))
    assert apart.peer.transport == "inline"
    caplog.clear()


async def test_memory_that_a_lost_worker_may_write_to_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch, apart: GpuStores
) -> None:
    way = apart.peer.ways.arrivals(apart.peer._linked())
    assert way is not None
    worker = way.gpus._use.worker

    async def lose(getting: Getting) -> torch.Tensor:
        raise GpuPathLost(GPUFailed("it is stuck"), worker)

    await apart.store.put("key", noise(MIB))
    into = apart.theirs.tensor(torch.zeros(MIB, dtype=torch.uint8))
    with monkeypatch.context() as patch:
        patch.setattr(Getting, "value", lose)
        patch.setattr(worker, "_error", GPUFailed("it is stuck"))
        with pytest.raises(GpuPathLost, match="it is stuck"):
            await apart.peer.store.get("key", into=into)
    assert is_same(await apart.peer.store.get("key"), noise(MIB))


async def test_a_lookup_and_a_store_are_both_read_where_they_lie(
    gpus: FakeGpus,
) -> None:
    here, there = (fake_device_of(gpus.process()).device for _ in range(2))
    async with (
        LookupBuffer("4MiB", device=here, drain_s=0) as lookup,
        StoreBuffer("4MiB", device=here) as store,
        serve("tcp://127.0.0.1:0", lookup=lookup, store=store) as server,
        connect(server.url, device=there, max_bytes="8MiB") as peer,
    ):
        await lookup.insert([1], None, noise(MIB, 1), None, None)
        await store.put("key", noise(MIB, 2))
        assert is_same(only((await peer.lookup.drop_select([1])).key), noise(MIB, 1))
        assert is_same(await peer.store.get("key"), noise(MIB, 2))
        assert peer.ways.reader(peer._linked(), views=False) is not None
        assert peer.ways.getting_by(peer._linked()).reader is not None


async def test_entries_in_host_memory_take_the_way_of_the_store_beside_them(
    two_gpus: FakeGpus,
) -> None:
    here = fake_device_of(two_gpus.process()).device
    there = fake_device_of(two_gpus.process(), 1).device
    async with (
        LookupBuffer("4MiB", drain_s=0) as lookup,
        StoreBuffer("4MiB", device=here) as store,
        serve("tcp://127.0.0.1:0", lookup=lookup, store=store) as server,
        connect(server.url, device=there, max_bytes="8MiB") as peer,
    ):
        assert peer.transport == "nccl"
        for number in range(3):
            await lookup.insert([1], None, noise(MIB, number), None, noise(8, 3))
            entry = await peer.lookup.drop_select([1])
            assert only(entry.key).is_cuda and is_same(entry.hidden, noise(8, 3))
            assert is_same(only(entry.key), noise(MIB, number))


async def test_buffers_on_two_gpus_go_through_host_memory(two_gpus: FakeGpus) -> None:
    process = two_gpus.process()
    here, beside = (fake_device_of(process, index).device for index in (0, 1))
    async with (
        LookupBuffer("4MiB", device=here, drain_s=0) as lookup,
        StoreBuffer("4MiB", device=beside) as store,
        serve("tcp://127.0.0.1:0?payload=inline", lookup=lookup, store=store) as server,
        connect(server.url, max_bytes="8MiB") as peer,
    ):
        await lookup.insert([1], None, noise(MIB, 1), None, None)
        await store.put("key", noise(MIB, 2))
        assert is_same(only((await peer.lookup.drop_select([1])).key), noise(MIB, 1))
        assert is_same(await peer.store.get("key"), noise(MIB, 2))
