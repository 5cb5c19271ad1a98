from __future__ import annotations

import ctypes.util
import threading

import pytest

from asynckv.devices.cupy import CudaDriver, open_driver
from asynckv.errors import GPUFailed, GPUUnavailable
from harness.cupy_double import LibcudaDouble

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
