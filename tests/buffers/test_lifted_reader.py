"""A peer on a GPU, and a buffer in the memory of the same host."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import torch

from asynckv.abc import KVEntry
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote import Peer, connect
from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.errors import EntryTooLarge, IncompatiblePeer
from asynckv.testing.blocked import until
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.testing.expectations import is_same
from asynckv.testing.fake_devices import FakeDevice, fake_device, fake_device_of
from asynckv.testing.fake_gpus import FakeGpus
from asynckv.testing.lookup_checks.values import MIB, noise


@pytest.fixture
async def on_gpu(local: LookupBuffer) -> AsyncIterator[tuple[FakeDevice, Peer]]:
    with fake_device() as gpu:
        async with (
            serve("tcp://127.0.0.1:0", lookup=local) as server,
            connect(server.url, device=gpu.device, max_bytes="16MiB") as peer,
        ):
            yield gpu, peer


async def fill(buffer: LookupBuffer) -> None:
    """Insert a large tensor and a small one."""
    await buffer.insert([1], None, noise(MIB), None, noise(8))


async def test_who_is_on_a_gpu_of_the_host_reads_mapped_memory(
    local: LookupBuffer, on_gpu: tuple[FakeDevice, Peer]
) -> None:
    await fill(local)
    _, peer = on_gpu
    entry = await peer.lookup.drop_select([1])
    assert peer.transport == "map"
    assert isinstance(entry.key, torch.Tensor) and entry.key.is_cuda
    assert is_same(entry.key, noise(MIB)) and is_same(entry.hidden, noise(8))
    await until(lambda: not local.statistics().pinned_bytes)


async def test_what_is_mapped_lands_at_the_callers_places(
    local: LookupBuffer, on_gpu: tuple[FakeDevice, Peer]
) -> None:
    gpu, peer = on_gpu
    await fill(local)
    into = {"key": gpu.tensor(noise(MIB, 2)), "hidden": noise(8, 2)}
    async with peer.lookup.drop_select([1], into=into) as entry:
        assert entry.key is into["key"] and is_same(into["key"], noise(MIB))
        assert entry.hidden is into["hidden"] and is_same(into["hidden"], noise(8))
        await until(lambda: not local.statistics().pinned_bytes)


async def test_what_is_mapped_and_larger_than_the_gpus_bound_is_refused(
    gpus: FakeGpus, local: LookupBuffer
) -> None:
    await fill(local)
    device = fake_device_of(gpus.process()).device
    async with (
        serve("tcp://127.0.0.1:0", lookup=local) as server,
        connect(server.url, device=device, max_bytes=MIB) as peer,
    ):
        with pytest.raises(EntryTooLarge):
            await peer.lookup.drop_select([1])
        assert peer.transport == "map"


async def test_a_cancelled_select_of_mapped_memory_leaves_nothing_in_use(
    local: LookupBuffer, on_gpu: tuple[FakeDevice, Peer]
) -> None:
    _, peer = on_gpu

    async def check(k: int, mode: CancelMode, outcome: Outcome[KVEntry]) -> None:
        await until(lambda: not peer.budget.used_bytes)
        if not await peer.lookup.peek([1]):
            return
        entry = await peer.lookup.drop_select([1])
        assert is_same(entry.hidden, noise(8))

    select = peer.lookup.drop_select
    await sweep_cancellation(lambda: select([1]), check, before=lambda: fill(local))
    await until(lambda: not local.statistics().pinned_bytes)


async def test_a_mapping_that_is_asked_for_and_is_not_there_is_an_error() -> None:
    gpus = FakeGpus()
    theirs = fake_device_of(gpus.process()).device
    async with (
        StoreBuffer("1MiB") as store,
        serve("tcp://127.0.0.1:0", store=store) as server,
    ):
        with pytest.raises(IncompatiblePeer, match="cannot be mapped"):
            async with connect(f"{server.url}?payload=map", device=theirs):
                raise AssertionError
    gpus.close()
