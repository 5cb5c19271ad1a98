from __future__ import annotations

import ctypes
import ctypes.util
import subprocess
import sys
import threading

import pytest

from asynckv.devices.cuda import DeviceMemory
from asynckv.devices.cupy import (
    CudaDriver,
    CupyCuda,
    import_cupy,
    open_cuda,
    open_driver,
)
from asynckv.errors import GPUFailed, GPUUnavailable
from harness.cupy_double import CUDARuntimeError, CupyDouble, LibcudaDouble


def test_a_part_of_device_memory_keeps_its_owner_and_its_gpu() -> None:
    memory = DeviceMemory(4096, 100, 1, owner=(owner := object()))
    part = memory.part(10, 30)
    assert (part.address, part.nbytes, part.device) == (4106, 20, 1)
    assert part.owner is owner


@pytest.mark.parametrize("span", [(-1, 5), (5, 4), (0, 101)])
def test_a_part_lies_within_its_memory(span: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="of 100 bytes"):
        DeviceMemory(4096, 100, 0).part(*span)


def test_the_seam_and_its_adapters_import_no_cupy() -> None:
    modules = "asynckv.devices.cupy, asynckv.transports.nccl.api"
    code = f"import sys, {modules}; assert 'cupy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


RELAXED = 2


def test_a_uuid_keeps_its_zero_bytes() -> None:
    library = LibcudaDouble(uuid=bytes(15) + b"\x07")
    assert CudaDriver(library).uuid(0) == "00" * 15 + "07"


def test_a_gpu_that_is_not_there_has_no_uuid() -> None:
    with pytest.raises(GPUFailed, match="ask GPU 3 for its UUID: CUDA error 101"):
        CudaDriver(LibcudaDouble()).uuid(3)


def test_a_relaxed_thread_stays_so() -> None:
    driver = CudaDriver(library := LibcudaDouble())
    driver.relax_capture()
    driver.relax_capture()
    with driver.capture_relaxed():
        assert library.mode == RELAXED
    assert library.mode == RELAXED


def test_another_threads_mode_is_its_own() -> None:
    driver = CudaDriver(library := LibcudaDouble())
    thread = threading.Thread(target=driver.relax_capture)
    thread.start()
    thread.join()
    library.mode = 0  # the real library has one for each thread
    with driver.capture_relaxed():
        assert library.mode == RELAXED
    assert library.mode == 0


def test_a_call_that_fails_leaves_the_mode_as_it_was() -> None:
    driver = CudaDriver(library := LibcudaDouble())
    with pytest.raises(ValueError), driver.capture_relaxed():
        raise ValueError
    assert library.mode == 0


@pytest.mark.skipif(
    ctypes.util.find_library("cuda") is not None, reason="a driver is installed here"
)
def test_without_a_driver_it_says_what_to_install() -> None:
    with pytest.raises(GPUUnavailable, match="libcuda") as caught:
        open_driver()
    assert "driver" in caught.value.hint


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> CupyDouble:
    double = CupyDouble()
    monkeypatch.setitem(sys.modules, "cupy", double)
    return double


@pytest.fixture
def library() -> LibcudaDouble:
    return LibcudaDouble()


@pytest.fixture
def cuda(cupy: CupyDouble, library: LibcudaDouble) -> CupyCuda:
    driver = CudaDriver(library)
    return CupyCuda(cupy, lambda: driver)


def test_without_cupy_it_says_which_extra_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(GPUUnavailable, match="not installed") as caught:
        import_cupy()
    assert "pip install" in caught.value.hint and ".[cuda13]" in caught.value.hint


def test_without_a_gpu_it_says_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", CupyDouble(has_gpu=False))
    with pytest.raises(GPUUnavailable, match="no CUDA driver") as caught:
        open_cuda()
    assert "nvidia-smi" in caught.value.hint


def test_memory_is_plain_and_of_the_threads_own_device(
    cupy: CupyDouble, cuda: CupyCuda
) -> None:
    cupy.answers.update(malloc=4096, getDevice=3)
    cuda.use_device(3)
    assert cuda.malloc(10) == DeviceMemory(4096, 10, 3)
    assert cupy.calls == [("setDevice", 3), ("malloc", 10), ("getDevice",)]


def test_streams_do_not_block_and_events_have_no_timing(cupy: CupyDouble) -> None:
    cuda = open_cuda()
    cuda.stream()
    cuda.event()
    assert cupy.calls == [("streamCreateWithFlags", 1), ("eventCreateWithFlags", 2)]


@pytest.mark.parametrize(("status", "has_fired"), [(0, True), (600, False)])
def test_an_event_has_fired_or_has_not(
    cupy: CupyDouble, cuda: CupyCuda, status: int, has_fired: bool
) -> None:
    cupy.answers["eventQuery"] = status
    assert cuda.event().query() is has_fired


def test_an_event_whose_work_failed_says_so(cupy: CupyDouble, cuda: CupyCuda) -> None:
    cupy.answers["eventQuery"] = 719
    with pytest.raises(GPUFailed, match="719") as caught:
        cuda.event().query()
    assert caught.value.code == 719


def test_what_cuda_refuses_is_an_error_of_ours(cupy: CupyDouble) -> None:
    cupy.answers["malloc"] = CUDARuntimeError(2)
    with pytest.raises(GPUFailed, match="allocate 10 bytes") as caught:
        open_cuda().malloc(10)
    assert caught.value.code == 2
    assert isinstance(caught.value.__cause__, CUDARuntimeError)


def test_a_closed_event_is_destroyed_once(cupy: CupyDouble) -> None:
    cupy.answers["eventCreateWithFlags"] = 7
    event = open_cuda().event()
    event.close()
    event.close()
    assert cupy.calls.count(("eventDestroy", 7)) == 1


def test_memory_of_another_process_is_opened_and_closed_by_its_address(
    cupy: CupyDouble, cuda: CupyCuda
) -> None:
    cupy.answers.update(ipcOpenMemHandle=4096, getDevice=3)
    memory = cuda.open_memory(b"handle", 10)
    assert memory == DeviceMemory(4096, 10, 3)
    cuda.close_memory(memory)
    assert cupy.calls[-1] == ("ipcCloseMemHandle", 4096)


def test_pinned_memory_is_looked_at_where_it_lies(cupy: CupyDouble) -> None:
    array = (ctypes.c_ubyte * 8)()
    cupy.answers["hostAlloc"] = ctypes.addressof(array)
    open_cuda().host_alloc(8).view[3] = 9
    assert bytes(array) == bytes([0, 0, 0, 9, 0, 0, 0, 0])


def test_the_uuid_of_a_gpu_is_read_whole(
    cuda: CupyCuda, library: LibcudaDouble
) -> None:
    library.uuid = b"\xab\x00" + bytes(range(14))
    assert cuda.uuid(0) == library.uuid.hex()


def test_a_thread_of_ours_breaks_no_capture_from_then_on(
    cuda: CupyCuda, library: LibcudaDouble
) -> None:
    cuda.use_device(0)
    assert library.mode == RELAXED


def test_on_a_thread_of_the_callers_only_the_call_itself_is_relaxed(
    cupy: CupyDouble, cuda: CupyCuda, library: LibcudaDouble
) -> None:
    modes = list[int]()

    def note() -> int:
        modes.append(library.mode)
        return 0

    cupy.answers.update(eventQuery=note, free=note)
    assert cuda.event().query()
    cuda.free(DeviceMemory(4096, 8, 0))
    assert modes == [RELAXED] * 2 and library.mode == 0
