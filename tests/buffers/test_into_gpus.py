"""Buffers in host memory, and memory of a GPU that the caller wants things in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import torch

from asynckv.abc import KVEntry
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import Peer, connect
from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.errors import GPUFailed
from asynckv.testing.blocked import until
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
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


async def test_a_tensor_that_is_borrowed_lands_on_a_gpu(
    gpu: FakeDevice, local: LookupBuffer, peer: Peer
) -> None:
    into = places(gpu, MIB)
    await local.insert([1], None, noise(MIB), None, None)
    async with peer.lookup.drop_select([1], into=into) as entry:
        assert entry.key is into["key"] and is_same(only(entry.key), noise(MIB))


async def test_a_stream_lands_on_a_gpu(
    gpu: FakeDevice, local: LookupBuffer, peer: Peer
) -> None:
    into = places(gpu, MIB)
    await local.insert([1], None, noise(MIB), noise(8, 2), None)
    async with peer.lookup.open_drop_select([1], into=into) as stream:
        assert await stream.wait_for("key") is into["key"]
        value = await stream.wait_for("value")
        assert is_same(value, noise(8, 2)) and not value.is_cuda
    assert is_same(into["key"], noise(MIB))


async def test_a_place_on_a_gpu_that_does_not_fit_gives_the_entry_back(
    gpu: FakeDevice, local: LookupBuffer, store: StoreBuffer, peer: Peer
) -> None:
    await local.insert([1], None, noise(MIB), None, None)
    await store.put("key", noise(MIB))
    with pytest.raises(ValueError, match="key"):
        await peer.lookup.drop_select([1], into=places(gpu, 8))
    with pytest.raises(ValueError, match="key"):
        await peer.store.get("key", into=places(gpu, 8)["key"])
    await until(lambda: not local.statistics().leased)
    assert is_same(only((await peer.lookup.drop_select([1])).key), noise(MIB))


async def test_a_gpu_that_fails_gives_the_entry_back(
    monkeypatch: pytest.MonkeyPatch, gpu: FakeDevice, local: LookupBuffer, peer: Peer
) -> None:
    def fail(*anything: object) -> None:
        raise GPUFailed("it has fallen off the bus")

    await local.insert([1], None, noise(MIB), None, None)
    with monkeypatch.context() as patch:
        patch.setattr(gpu.process.cuda, "copy", fail)
        with pytest.raises(GPUFailed, match="off the bus"):
            await peer.lookup.drop_select([1], into=places(gpu, MIB))
    await until(lambda: not local.statistics().leased)
    assert is_same(only((await peer.lookup.drop_select([1])).key), noise(MIB))


async def test_a_cancelled_select_leaves_the_gpu_alone(
    gpu: FakeDevice, local: LookupBuffer, peer: Peer
) -> None:
    into = places(gpu, MIB)

    async def before() -> None:
        await local.insert([1], None, noise(MIB), None, None)

    async def check(k: int, mode: CancelMode, outcome: Outcome[KVEntry]) -> None:
        assert not [x for x in gpu.process.space.allocations() if x.users]
        into["key"].fill_(9)
        if outcome.cancelled:
            assert is_same(only((await peer.lookup.drop_select([1])).key), noise(MIB))
        assert bool((into["key"] == 9).all())

    await sweep_cancellation(
        lambda: peer.lookup.drop_select([1], into=into), check, before=before
    )
