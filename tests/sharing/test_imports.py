"""Entries in one process's memory of a GPU, read by another on the same GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from asynckv.abc import KVEntry
from asynckv.buffers.remote.peer import connect
from asynckv.devices.arena import place_of
from asynckv.devices.cuda import DeviceMemory
from asynckv.errors import ChecksumError
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.tensors.views import MISSING_DTYPES, bytes_of, tensor_from
from asynckv.testing.blocked import until
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.testing.expectations import is_same
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.types import DTYPE_NBYTES, TensorSpec
from harness.fake_gpus.streams import Delay
from harness.gpu_pairs import GpuPair

DTYPES = sorted(DTYPE_NBYTES.keys() - MISSING_DTYPES)

pytestmark = pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles")


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is in use until it is collected stays in use."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def test_an_entry_is_copied_from_one_process_to_the_other_on_the_gpu(
    pair: GpuPair,
) -> None:
    assert pair.peer.transport == "cuda_ipc"
    await pair.buffer.insert([1], None, pair.ours.tensor(noise(MIB)), None, None)
    entry = await pair.peer.lookup.drop_select([1])
    assert isinstance(entry.key, torch.Tensor) and entry.key.is_cuda
    assert is_same(entry.key, noise(MIB))
    await until(lambda: not pair.buffer.statistics().used_bytes)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
async def test_a_copy_of_every_dtype_has_the_same_bytes(pair: GpuPair) -> None:
    for name in DTYPES:
        spec = TensorSpec((MIB // DTYPE_NBYTES[name],), name)
        value = tensor_from(bytes_of(noise(MIB)), spec)
        await pair.buffer.insert([1], None, pair.ours.tensor(value), None, None)
        entry = await pair.peer.lookup.drop_select([1])
        assert isinstance(entry.key, torch.Tensor)
        assert is_same(entry.key, value), name


async def test_inside_async_with_there_are_views_and_no_copy(pair: GpuPair) -> None:
    await pair.buffer.insert([1], None, pair.ours.tensor(noise(MIB)), None, None)
    async with pair.peer.lookup.drop_select([1]) as entry:
        assert isinstance(entry.key, torch.Tensor) and is_same(entry.key, noise(MIB))
        lent = pair.theirs.tensors.memory_of(entry.key).address
        handle = pair.theirs.process.cuda._opened
        assert any(0 <= lent - opened < 2**25 for opened in handle.values())


async def test_a_view_keeps_its_memory_when_its_entry_has_left(pair: GpuPair) -> None:
    await pair.buffer.insert([1], None, pair.ours.tensor(noise(MIB)), None, None)
    async with pair.peer.lookup.drop_select([1]) as entry:
        key = entry.key
        del entry
    assert pair.buffer.statistics().pinned_bytes == MIB
    assert isinstance(key, torch.Tensor) and is_same(key, noise(MIB))
    del key
    await until(lambda: not pair.buffer.statistics().pinned_bytes)


async def test_memory_is_not_reused_before_the_gpu_has_left_a_view(
    pair: GpuPair,
) -> None:
    await pair.buffer.insert([1], None, pair.ours.tensor(noise(MIB)), None, None)
    stream = pair.theirs.tensors.stream(0)
    async with pair.peer.lookup.drop_select([1]) as entry:
        stream.add(Delay(20))  # the GPU still reads, whatever became of the tensor
        del entry
    assert pair.buffer.statistics().pinned_bytes == MIB
    await until(lambda: not pair.buffer.statistics().pinned_bytes)
    assert not stream.work


@pytest.mark.parametrize("nbytes", [8, 64 * 1024, MIB])
async def test_what_is_small_comes_to_the_gpu_too(pair: GpuPair, nbytes: int) -> None:
    await pair.buffer.insert([1], None, noise(nbytes), None, noise(8))
    async with pair.peer.lookup.drop_select([1]) as entry:
        assert isinstance(entry.key, torch.Tensor) and entry.key.is_cuda
        assert is_same(entry.key, noise(nbytes)) and is_same(entry.hidden, noise(8))


async def test_tensors_land_in_memory_of_the_gpu_that_the_caller_has(
    pair: GpuPair,
) -> None:
    for nbytes in (64, MIB):
        await pair.buffer.insert([1], None, noise(nbytes), None, None)
        into = {"key": pair.theirs.tensor(torch.zeros(nbytes, dtype=torch.uint8))}
        entry = await pair.peer.lookup.drop_select([1], into=into)
        assert entry.key is into["key"] and is_same(entry.key, noise(nbytes))


async def test_bytes_that_changed_at_an_edge_are_refused(pair: GpuPair) -> None:
    await pair.buffer.insert([1], None, pair.ours.tensor(noise(MIB)), None, None)
    (stored,) = pair.buffer.ledger.table.entries.values()
    place = place_of(stored.regions[0], stored.parts[0].spec)
    assert isinstance(place, DeviceMemory)
    pair.ours.process.cuda.view(place)[0] ^= 1
    with pytest.raises(ChecksumError):
        await pair.peer.lookup.drop_select([1])


async def test_an_allocation_is_open_once_however_many_peers_want_it(
    pair: GpuPair,
) -> None:
    (url,) = {pair.peer.url}
    async with connect(url, device=pair.theirs.device, max_bytes="1MiB") as second:
        assert second.transport == pair.peer.transport == "cuda_ipc"
        assert len(pair.theirs.process.cuda._opened) == 1
    assert len(pair.theirs.process.cuda._opened) == 1


@pytest.mark.usefixtures("no_collector")
async def test_a_cancelled_select_gives_the_entry_and_its_memory_back(
    pair: GpuPair,
) -> None:
    async def check(k: int, mode: CancelMode, outcome: Outcome[KVEntry]) -> None:
        if outcome.cancelled:
            entry = await pair.peer.lookup.drop_select([1])
            assert isinstance(entry.key, torch.Tensor)
            assert is_same(entry.key, noise(MIB))

    async def fill() -> None:
        key = pair.ours.tensor(noise(MIB))
        await pair.buffer.insert([1], None, key, None, None)

    select = pair.peer.lookup.drop_select
    await sweep_cancellation(lambda: select([1]), check, before=fill)
    await until(lambda: not pair.buffer.statistics().used_bytes)


async def test_who_has_no_gpu_gets_entries_through_host_memory(pair: GpuPair) -> None:
    async with connect(pair.peer.url, max_bytes="16MiB") as plain:
        assert plain.transport != "cuda_ipc"
        for nbytes in (64, MIB):
            await pair.buffer.insert([1], None, noise(nbytes), None, None)
            entry = await plain.lookup.drop_select([1])
            assert isinstance(entry.key, torch.Tensor) and not entry.key.is_cuda
            assert is_same(entry.key, noise(nbytes))


async def test_who_asks_for_lanes_gets_it_through_host_memory(pair: GpuPair) -> None:
    device, url = pair.theirs.device, f"{pair.peer.url}?payload=inline"
    async with connect(url, device=device, max_bytes="16MiB") as other:
        await pair.buffer.insert([1], None, noise(MIB), None, None)
        entry = await other.lookup.drop_select([1])
        assert isinstance(entry.key, torch.Tensor) and entry.key.is_cuda
        assert is_same(entry.key, noise(MIB)) and other.transport == "inline"
        del entry


@pytest.mark.parametrize("nbytes", [64, MIB])
async def test_a_peer_inserts_into_memory_of_a_gpu(pair: GpuPair, nbytes: int) -> None:
    key = pair.theirs.tensor(noise(nbytes))
    await pair.peer.lookup.insert([1], None, key, None, None)
    entry = await pair.buffer.drop_select([1])
    assert isinstance(entry.key, torch.Tensor) and entry.key.is_cuda
    assert is_same(entry.key, noise(nbytes))
