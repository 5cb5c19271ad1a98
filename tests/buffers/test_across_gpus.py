"""Entries on a GPU for peers that have none, and of the host for who has one."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Final

import pytest
import torch

from asynckv import (
    LeaseLost,
    LookupBuffer,
    Peer,
    StoreBuffer,
    TensorSpec,
    connect,
    serve,
)
from asynckv.buffers.entries.entries import StoredEntry
from asynckv.tensors.views import empty_tensor
from asynckv.testing import LOOKUP_CHECKS, until
from asynckv.testing.expectations import is_same, only
from asynckv.testing.lookup_checks.values import (
    LOOKUP_MAX_BYTES,
    MIB,
    LookupCheck,
    noise,
)
from asynckv.testing.pairs import Scheme, new_url
from asynckv.transfers.incoming import Incoming
from harness.fake_devices import FakeDevice, fake_device
from harness.fake_gpus import FakeGpus
from harness.gpu_pairs import GpuPair, open_gpu_pair

SMALL = 64 * 1024

WAYS: Final[Mapping[str, Mapping[str, Any]]] = {
    "cuda_ipc": {},
    "inline": {"device": None},
    "inline to a GPU": {"theirs": 1, "url": "?payload=inline"},
}

# Of these every check runs for a release; tests of single routes run always.
OTHERS = ("cuda_ipc", "inline")

LAYERS = {"key": TensorSpec((MIB,), "uint8"), "hidden": TensorSpec((8,), "uint8")}


@pytest.fixture
async def pair(gpus: FakeGpus) -> AsyncIterator[GpuPair]:
    """A buffer on a GPU, and a peer that has none, nor maps memory."""
    async with open_gpu_pair(gpus, device=None, url="?payload=inline") as pair:
        yield pair


def is_on_gpu(entry: StoredEntry) -> bool:
    return any(region.is_on_device for region in entry.regions)


async def fill(buffer: LookupBuffer) -> None:
    """Insert a large tensor and a small one."""
    await buffer.insert([1], None, noise(MIB), None, noise(8))


async def test_an_entry_that_is_taken_early_needs_no_more_layers(pair: GpuPair) -> None:
    async with pair.peer.lookup.open_insert([1], None, LAYERS) as writer:
        async with pair.buffer.open_drop_select([1]):
            await writer.put("hidden", noise(8))
        await writer.put("key", noise(MIB))
    await until(lambda: not pair.buffer.statistics().used_bytes)


async def test_of_a_layer_that_is_on_the_gpu_the_host_keeps_nothing(
    pair: GpuPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, copies = pair.buffer.pool, list[weakref.ref[torch.Tensor]]()

    def note(spec: TensorSpec) -> torch.Tensor:
        copies.append(weakref.ref(copy := empty_tensor(spec)))
        return copy

    monkeypatch.setattr(pool, "host_empty", note)
    async with pair.peer.lookup.open_insert([1], None, LAYERS) as writer:
        await writer.put("key", noise(MIB))
        (entry,) = pair.buffer.ledger.table.entries.values()
        await until(lambda: 0 in entry.landed)
        await until(lambda: copies[0]() is None)
        await writer.put("hidden", noise(8))


async def test_an_entry_that_leaves_while_a_layer_is_lifted_needs_it_no_more(
    monkeypatch: pytest.MonkeyPatch, pair: GpuPair
) -> None:
    copy, leases = Incoming._copy_soon, pair.buffer.ledger.leases

    def copy_too_late(incoming: Incoming, part: int) -> None:
        (entry,) = pair.buffer.ledger.table.entries.values()
        leases.acknowledge(next(iter(entry.leases.values())))
        copy(incoming, part)

    monkeypatch.setattr(Incoming, "_copy_soon", copy_too_late)
    async with pair.peer.lookup.open_insert([1], None, LAYERS) as writer:
        with pytest.raises(LeaseLost):
            async with pair.buffer.open_drop_select([1]):
                await writer.put("key", noise(MIB))
                await until(lambda: not pair.buffer.ledger.table.entries)
        await writer.put("hidden", noise(8))
    await until(lambda: not pair.buffer.statistics().used_bytes)


async def test_small_entries_get_to_and_from_a_gpu_that_holds_many_of_them(
    pair: GpuPair,
) -> None:
    count = 4 * MIB // SMALL + 8  # more than stay in host memory
    for number in range(count):
        await pair.peer.lookup.insert([number], None, noise(SMALL, number), None, None)
    on_gpu = [e for e in pair.buffer.ledger.table.entries.values() if is_on_gpu(e)]
    assert len(on_gpu) >= 8
    for number in range(count):
        entry = await pair.peer.lookup.drop_select([number])
        assert is_same(only(entry.key), noise(SMALL, number))


async def test_small_layers_get_to_a_gpu_that_holds_many(pair: GpuPair) -> None:
    for number in range(4 * MIB // SMALL):
        await pair.buffer.insert([number], None, noise(SMALL, 1), None, None)
    specs = {"key": TensorSpec((SMALL,), "uint8")}
    async with pair.peer.lookup.open_insert([777], None, specs) as writer:
        await writer.put("key", noise(SMALL, 7))
    assert is_on_gpu(pair.buffer.ledger.table.entries[writer.entry_id])
    assert is_same(only((await pair.buffer.drop_select([777])).key), noise(SMALL, 7))


@pytest.mark.parametrize(
    "way",
    [
        "inline to a GPU",
        *(pytest.param(way, marks=pytest.mark.chaos) for way in OTHERS),
    ],
)
@pytest.mark.parametrize("check", LOOKUP_CHECKS, ids=lambda check: check.__name__)
async def test_a_served_lookup_on_a_gpu_keeps_what_every_one_keeps(
    two_gpus: FakeGpus, check: LookupCheck, way: str
) -> None:
    async with (
        open_gpu_pair(two_gpus, buffer_bytes=LOOKUP_MAX_BYTES, **WAYS[way]) as pair,
        connect(pair.server.url) as producer,
    ):
        assert pair.peer.transport == way.partition(" ")[0]
        await check(producer.lookup, pair.peer.lookup, pair.buffer)


async def test_what_is_borrowed_from_another_gpu_is_a_copy(two_gpus: FakeGpus) -> None:
    two_gpus.has_peer_access = True
    async with open_gpu_pair(two_gpus, theirs=1) as pair:
        await fill(pair.buffer)
        async with pair.peer.lookup.drop_select([1]) as entry:
            assert pair.peer.transport == "cuda_ipc" and pair.opened == 1
            await until(lambda: not pair.buffer.statistics().mapped_by)
            assert only(entry.key).device == torch.device("cuda", 1)
            assert is_same(only(entry.key), noise(MIB))
        assert not pair.peer.lookup.reads_gpu_memory


async def test_it_is_known_whether_a_peers_memory_is_read_where_it_lies(
    gpus: FakeGpus, pair: GpuPair
) -> None:
    assert not pair.peer.lookup.reads_gpu_memory
    async with open_gpu_pair(gpus) as shared:
        assert shared.peer.lookup.reads_gpu_memory
        shared.peer.abort()
        assert not shared.peer.lookup.reads_gpu_memory


SIZES = [8, MIB]


@pytest.fixture
def gpu() -> Iterator[FakeDevice]:
    with fake_device(max_delay=2) as gpu:
        yield gpu


@pytest.fixture
async def store_near(gpu: FakeDevice) -> AsyncIterator[StoreBuffer]:
    async with StoreBuffer("8MiB") as store_near:
        store_near.pool.lanes = gpu.lanes()
        yield store_near


@pytest.fixture(params=["map", "tcp", "mem"])
async def near(
    request: pytest.FixtureRequest,
    gpu: FakeDevice,
    local: LookupBuffer,
    store_near: StoreBuffer,
) -> AsyncIterator[Peer]:
    scheme: Scheme = request.param
    async with (
        serve(new_url(scheme), lookup=local, store=store_near) as server,
        connect(server.url, max_bytes="8MiB") as near,
    ):
        near.pool.lanes = gpu.lanes()
        yield near


def places(gpu: FakeDevice, nbytes: int) -> dict[str, torch.Tensor]:
    return {"key": gpu.tensor(torch.zeros(nbytes, dtype=torch.uint8))}


@pytest.mark.parametrize("nbytes", SIZES)
async def test_a_value_of_this_process_lands_on_a_gpu(
    gpu: FakeDevice, store_near: StoreBuffer, nbytes: int
) -> None:
    into = places(gpu, nbytes)["key"]
    await store_near.put("key", noise(nbytes))
    assert await store_near.get("key", into=into) is into
    assert is_same(into, noise(nbytes))


@pytest.mark.parametrize("nbytes", SIZES)
async def test_a_value_of_a_peer_lands_on_a_gpu(
    gpu: FakeDevice, store_near: StoreBuffer, near: Peer, nbytes: int
) -> None:
    into = places(gpu, nbytes)["key"]
    await store_near.put("key", noise(nbytes))
    assert await near.store.get("key", into=into) is into
    assert is_same(into, noise(nbytes)) and not near.budget.used_bytes


@pytest.mark.parametrize("nbytes", SIZES)
async def test_a_tensor_of_a_peer_lands_on_a_gpu_and_the_others_do_not(
    gpu: FakeDevice, local: LookupBuffer, near: Peer, nbytes: int
) -> None:
    into = places(gpu, nbytes)
    await local.insert([1], None, noise(nbytes), noise(MIB, 2), noise(8, 3))
    entry = await near.lookup.drop_select([1], into=into)
    assert entry.key is into["key"] and is_same(only(entry.key), noise(nbytes))
    assert is_same(only(entry.value), noise(MIB, 2)) and is_same(
        entry.hidden, noise(8, 3)
    )
    assert isinstance(entry.value, torch.Tensor) and not entry.value.is_cuda
    await until(lambda: not local.statistics().used_bytes)
