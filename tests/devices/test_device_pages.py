from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest

from asynckv.devices.arena import MARK_NBYTES, DevicePages
from asynckv.devices.cuda import DeviceMemory
from asynckv.devices.names import Device
from asynckv.devices.quiet import QuietGpu, quiet_gpu
from asynckv.errors import GPUFailed, GPUUnavailable
from harness.fake_devices import FakeDevice

MIB = 2**20


def pages_on(device: Device, max_bytes: int = 4 * MIB) -> DevicePages:
    return DevicePages(max_bytes, device, lambda: None)


@contextlib.contextmanager
def waiting_for(quiet: QuietGpu, call: Callable[[], object]) -> Iterator[None]:
    """Call it in a thread beside an operation, which ends behind the block."""
    quiet.begin_operation()
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(0.02)
    yield
    quiet.end_operation()
    thread.join(30)


def limit(gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch, max_nbytes: int) -> None:
    """Let the GPU have no more memory than that."""
    cuda = gpu.process.cuda
    malloc = cuda.malloc

    def refuse(nbytes: int) -> DeviceMemory:
        if nbytes > max_nbytes:
            raise GPUFailed("out of memory", code=2)
        return malloc(nbytes)

    monkeypatch.setattr(cuda, "malloc", refuse)


def test_all_of_it_is_allocated_at_once_beside_a_mark(gpu: FakeDevice) -> None:
    pages = pages_on(gpu.device)
    assert pages.add_slab(pages.make_slab()) and pages.free_bytes == 4 * MIB
    allocation = pages.allocation
    mark = bytes(gpu.process.cuda.view(allocation.mark))
    assert len(mark) == MARK_NBYTES and mark.startswith(allocation.nonce)


def test_nothing_is_allocated_or_freed_while_an_operation_waits_for_a_peer(
    gpu: FakeDevice,
) -> None:
    quiet, pages = quiet_gpu(gpu.process.cuda, gpu.index), pages_on(gpu.device)
    with waiting_for(quiet, pages.make_slab):
        assert not pages.is_open
    assert pages.is_open
    idle = pages.unmap()
    assert idle is not None
    with waiting_for(quiet, idle.drop):
        assert gpu.process.owned
    assert not gpu.process.owned


def test_where_the_whole_cannot_be_had_a_half_is_taken(
    gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(gpu, monkeypatch, 3 * MIB)
    pages = pages_on(gpu.device)
    assert not pages.add_slab(pages.make_slab())
    assert pages.nbytes == 2 * MIB and not pages.could_ever_fit([3 * MIB])


def test_where_there_is_nothing_the_error_is_kept(
    gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(gpu, monkeypatch, 0)
    pages = pages_on(gpu.device)
    assert pages.make_slab() is None
    assert isinstance(pages.error, GPUFailed)
    assert not pages.add_slab(None) and not pages.is_usable


def test_a_gpu_that_is_not_there_is_named(gpu: FakeDevice) -> None:
    pages = pages_on(Device(9, gpu.device.open))
    assert pages.make_slab() is None
    assert isinstance(pages.error, GPUUnavailable) and "cuda:9" in str(pages.error)


def test_dropped_memory_goes_with_its_last_view(gpu: FakeDevice) -> None:
    pages = pages_on(gpu.device)
    pages.add_slab(pages.make_slab())
    view, idle = pages.allocation, pages.unmap()
    assert idle is not None and pages.unmap() is None
    idle.drop()
    assert gpu.process.owned
    del view
    assert not gpu.process.owned


def test_there_is_memory_once_it_is_allocated_and_no_more_than_that(
    gpu: FakeDevice,
) -> None:
    pages = pages_on(gpu.device)
    assert pages.is_growing
    with pytest.raises(RuntimeError, match="yet"):
        _ = pages.allocation
    pages.add_slab(pages.make_slab())
    assert not pages.is_growing
    assert pages.take([4 * MIB + 1]) is None
    (place,) = pages.take([4 * MIB]) or []
    pages.free(place[0])
    assert pages.free_bytes == 4 * MIB


def test_so_little_memory_is_none(
    gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(gpu, monkeypatch, MIB // 2)
    pages = pages_on(gpu.device)
    assert pages.make_slab() is None and not pages.is_open
    assert isinstance(pages.error, GPUFailed)


def test_closed_pages_want_nothing(gpu: FakeDevice) -> None:
    wanted: list[str] = []
    pages = DevicePages(MIB, gpu.device, lambda: wanted.append("memory"))
    pages.want()
    pages.close()
    pages.want()
    assert wanted == ["memory"]
