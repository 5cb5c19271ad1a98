"""Buffers in host memory, and memory of a GPU that the caller wants things in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import Peer, connect
from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.testing.blocked import until
from asynckv.testing.expectations import is_same, only
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.testing.pairs import Scheme, new_url
from harness.fake_devices import FakeDevice, fake_device

SIZES = [8, MIB]


@pytest.fixture
def gpu() -> Iterator[FakeDevice]:
    with fake_device(max_delay=2) as gpu:
        yield gpu


@pytest.fixture
async def store(gpu: FakeDevice) -> AsyncIterator[StoreBuffer]:
    async with StoreBuffer("8MiB") as store:
        store.pool.lanes = gpu.lanes()
        yield store


@pytest.fixture(params=["map", "tcp", "mem"])
async def peer(
    request: pytest.FixtureRequest,
    gpu: FakeDevice,
    local: LookupBuffer,
    store: StoreBuffer,
) -> AsyncIterator[Peer]:
    scheme: Scheme = request.param
    async with (
        serve(new_url(scheme), lookup=local, store=store) as server,
        connect(server.url, max_bytes="8MiB") as peer,
    ):
        peer.pool.lanes = gpu.lanes()
        yield peer


def places(gpu: FakeDevice, nbytes: int) -> dict[str, torch.Tensor]:
    return {"key": gpu.tensor(torch.zeros(nbytes, dtype=torch.uint8))}


@pytest.mark.parametrize("nbytes", SIZES)
async def test_a_value_of_this_process_lands_on_a_gpu(
    gpu: FakeDevice, store: StoreBuffer, nbytes: int
) -> None:
    into = places(gpu, nbytes)["key"]
    await store.put("key", noise(nbytes))
    assert await store.get("key", into=into) is into
    assert is_same(into, noise(nbytes))


@pytest.mark.parametrize("nbytes", SIZES)
async def test_a_value_of_a_peer_lands_on_a_gpu(
    gpu: FakeDevice, store: StoreBuffer, peer: Peer, nbytes: int
) -> None:
    into = places(gpu, nbytes)["key"]
    await store.put("key", noise(nbytes))
    assert await peer.store.get("key", into=into) is into
    assert is_same(into, noise(nbytes)) and not peer.budget.used_bytes


@pytest.mark.parametrize("nbytes", SIZES)
async def test_a_tensor_of_a_peer_lands_on_a_gpu_and_the_others_do_not(
    gpu: FakeDevice, local: LookupBuffer, peer: Peer, nbytes: int
) -> None:
    into = places(gpu, nbytes)
    await local.insert([1], None, noise(nbytes), noise(MIB, 2), noise(8, 3))
    entry = await peer.lookup.drop_select([1], into=into)
    assert entry.key is into["key"] and is_same(only(entry.key), noise(nbytes))
    assert is_same(only(entry.value), noise(MIB, 2)) and is_same(
        entry.hidden, noise(8, 3)
    )
    assert isinstance(entry.value, torch.Tensor) and not entry.value.is_cuda
    await until(lambda: not local.statistics().used_bytes)
