"""CUDA by CuPy's thin bindings of its runtime; CuPy's arrays and pools are not used.

CuPy is imported by :func:`open_cuda` and by nothing else: it takes 0.4 s, and is not
there on most machines. Of its calls those that allocate, copy or synchronise release
the GIL; those of IPC handles do not, and may be slow.

What CUDA's driver library says that CuPy and torch do not pass on is asked by ctypes.
A GPU's UUID: CuPy reads it as a C string, which ends at the first zero byte. And the
capture mode of a thread: while an engine captures a graph, a call such as
``cudaEventQuery`` or ``cudaMalloc`` from *any* thread in the default mode fails, and
the capture with it. A thread in the relaxed mode breaks nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

from asynckv.devices.cuda import CudaApi, DeviceMemory, Event, PinnedMemory, Stream
from asynckv.errors import GPUFailed, GPUUnavailable

__all__ = (
    "CudaDriver",
    "CupyCuda",
    "CupyEvent",
    "CupyStream",
    "import_cupy",
    "open_cuda",
    "open_driver",
)


_LIBRARY: Final = "libcuda.so.1"
_RELAXED: Final = 2
_UUID_NBYTES: Final = 16


class CudaDriver:
    """``library`` is what :class:`ctypes.CDLL` returns for the driver."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._thread = threading.local()

    def uuid(self, device: int) -> str:
        """Return the UUID of a GPU, or of its MIG slice: 32 hexadecimal digits.

        :raises GPUFailed: there is no such GPU
        """
        handle, uuid = ctypes.c_int(), (ctypes.c_ubyte * _UUID_NBYTES)()
        asking = f"ask GPU {device} for its UUID"
        self._call("cuInit", asking, 0)
        self._call("cuDeviceGet", asking, ctypes.byref(handle), device)
        self._call("cuDeviceGetUuid_v2", asking, ctypes.byref(uuid), handle)
        return bytes(uuid).hex()

    def relax_capture(self) -> None:
        """Let this thread call CUDA while another captures a graph, from now on.

        For threads of asynckv's own: what the thread itself captured would not be
        checked any more. A second call does nothing.
        """
        if not getattr(self._thread, "is_relaxed", False):
            self._exchange(_RELAXED)
            self._thread.is_relaxed = True

    @contextlib.contextmanager
    def capture_relaxed(self) -> Iterator[None]:
        """As :meth:`relax_capture`, until it is left: for a thread of the caller's."""
        if getattr(self._thread, "is_relaxed", False):
            yield
            return
        before = self._exchange(_RELAXED)
        try:
            yield
        finally:
            self._exchange(before)

    def _exchange(self, mode: int) -> int:
        given = ctypes.c_int(mode)
        name = "cuThreadExchangeStreamCaptureMode"
        self._call(name, "set the capture mode", ctypes.byref(given))
        return given.value

    def _call(self, name: str, doing: str, *arguments: object) -> None:
        status = int(getattr(self._library, name)(*arguments))
        if status:
            raise GPUFailed(f"{doing}: CUDA error {status}", code=status)


@functools.cache
def open_driver() -> CudaDriver:
    """Return this process's driver.

    :raises GPUUnavailable: it is not installed
    """
    try:
        return CudaDriver(ctypes.CDLL(_LIBRARY))
    except OSError as exc:
        raise GPUUnavailable(
            f"{_LIBRARY} cannot be loaded: {exc}",
            hint="install NVIDIA's driver; start a container with --gpus all",
        ) from exc


_SUCCESS: Final = 0
_NOT_READY: Final = 600
_STREAM_NON_BLOCKING: Final = 1
_EVENT_DISABLE_TIMING: Final = 2
_HOST_PORTABLE: Final = 1
_MEMCPY_DEFAULT: Final = 4  # CUDA tells device and pinned addresses apart


def import_cupy() -> Any:
    """Return the module ``cupy``.

    :raises GPUUnavailable: it is not installed, or cannot be loaded
    """
    try:
        return importlib.import_module("cupy")
    except ImportError as exc:
        raise GPUUnavailable(
            "CuPy is not installed" if exc.name == "cupy" else f"CuPy: {exc}",
            hint='in a checkout of asynckv: python -m pip install ".[cuda12]", or '
            '".[cuda13]" for a driver of CUDA 13',
        ) from exc


def open_cuda() -> CudaApi:
    """Return CUDA by CuPy. Imports it, so not on an event loop.

    :raises GPUUnavailable: CuPy, a driver or a GPU is missing
    """
    cupy = import_cupy()
    if not cupy.cuda.is_available():
        raise GPUUnavailable(
            "CuPy finds no CUDA driver, or no GPU",
            hint="nvidia-smi must list a GPU: install NVIDIA's driver; start a "
            "container with --gpus all; see CUDA_VISIBLE_DEVICES",
        )
    return CupyCuda(cupy)


@contextlib.contextmanager
def _mapped(runtime: Any, doing: str) -> Iterator[None]:
    """Let what CuPy raises of CUDA leave as an error of asynckv."""
    try:
        yield
    except runtime.CUDARuntimeError as exc:
        raise GPUFailed(f"{doing}: {exc}", code=int(exc.status)) from exc


class CupyEvent:
    """An event, closed by hand: who closes it decides on which thread."""

    def __init__(
        self, runtime: Any, handle: int, driver: Callable[[], CudaDriver]
    ) -> None:
        self._runtime = runtime
        self.handle = handle
        self._driver = driver

    def record(self, stream: Stream) -> None:
        with _mapped(self._runtime, "record an event"):
            self._runtime.eventRecord(self.handle, stream.handle)

    def query(self) -> bool:
        # CuPy returns the status here, and its Event.done takes an error for "not yet".
        with self._driver().capture_relaxed():  # polled on the caller's loop too
            status = int(self._runtime.eventQuery(self.handle))
        if status not in (_SUCCESS, _NOT_READY):
            raise GPUFailed(f"work on the GPU failed: CUDA error {status}", code=status)
        return status == _SUCCESS

    def synchronize(self) -> None:
        with _mapped(self._runtime, "wait for an event"):
            self._runtime.eventSynchronize(self.handle)

    def close(self) -> None:
        handle, self.handle = self.handle, 0
        if handle:
            with _mapped(self._runtime, "destroy an event"):
                self._runtime.eventDestroy(handle)


class CupyStream:
    """A non-blocking stream, closed by hand."""

    def __init__(self, runtime: Any, handle: int) -> None:
        self._runtime = runtime
        self.handle = handle

    def wait(self, event: Event) -> None:
        if not isinstance(event, CupyEvent):
            raise TypeError(f"not an event of CuPy's: {event!r}")
        with _mapped(self._runtime, "let a stream wait"):
            self._runtime.streamWaitEvent(self.handle, event.handle)

    def synchronize(self) -> None:
        with _mapped(self._runtime, "wait for a stream"):
            self._runtime.streamSynchronize(self.handle)

    def close(self) -> None:
        handle, self.handle = self.handle, 0
        if handle:
            with _mapped(self._runtime, "destroy a stream"):
                self._runtime.streamDestroy(handle)


class CupyCuda:
    """:class:`~asynckv.devices.cuda.CudaApi` over the module ``cupy``."""

    def __init__(
        self, cupy: Any, driver: Callable[[], CudaDriver] = open_driver
    ) -> None:
        self._driver = driver
        self._runtime = cupy.cuda.runtime

    def device_count(self) -> int:
        with _mapped(self._runtime, "count GPUs"):
            return int(self._runtime.getDeviceCount())

    def uuid(self, device: int) -> str:
        return self._driver().uuid(device)

    def use_device(self, device: int) -> None:
        self._driver().relax_capture()
        with _mapped(self._runtime, f"use GPU {device}"):
            self._runtime.setDevice(device)

    def malloc(self, nbytes: int) -> DeviceMemory:
        with _mapped(self._runtime, f"allocate {nbytes} bytes of a GPU"):
            address = int(self._runtime.malloc(nbytes))
            return DeviceMemory(address, nbytes, int(self._runtime.getDevice()))

    def free(self, memory: DeviceMemory) -> None:
        freeing = _mapped(self._runtime, "free memory of a GPU")
        with (
            self._driver().capture_relaxed(),
            freeing,
        ):  # a finalizer runs in any thread
            self._runtime.free(memory.address)

    def host_alloc(self, nbytes: int) -> PinnedMemory:
        with _mapped(self._runtime, f"allocate {nbytes} bytes of pinned memory"):
            address = int(self._runtime.hostAlloc(nbytes, _HOST_PORTABLE))
        array = (ctypes.c_ubyte * nbytes).from_address(address)
        return PinnedMemory(address, memoryview(array).cast("B"))

    def host_free(self, memory: PinnedMemory) -> None:
        with _mapped(self._runtime, "free pinned memory"):
            self._runtime.freeHost(memory.address)

    def stream(self) -> CupyStream:
        runtime = self._runtime
        with _mapped(runtime, "make a stream"):
            handle = int(runtime.streamCreateWithFlags(_STREAM_NON_BLOCKING))
        return CupyStream(runtime, handle)

    def event(self) -> CupyEvent:
        with _mapped(self._runtime, "make an event"):
            handle = int(self._runtime.eventCreateWithFlags(_EVENT_DISABLE_TIMING))
        return CupyEvent(self._runtime, handle, self._driver)

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        with _mapped(self._runtime, f"copy {nbytes} bytes"):
            self._runtime.memcpyAsync(
                target, source, nbytes, _MEMCPY_DEFAULT, stream.handle
            )

    def export(self, memory: DeviceMemory) -> bytes:
        with _mapped(self._runtime, "export memory of a GPU"):
            return bytes(self._runtime.ipcGetMemHandle(memory.address))

    def open_memory(self, handle: bytes, nbytes: int) -> DeviceMemory:
        with _mapped(self._runtime, "open another process's memory of a GPU"):
            address = int(self._runtime.ipcOpenMemHandle(handle))
            return DeviceMemory(address, nbytes, int(self._runtime.getDevice()))

    def close_memory(self, memory: DeviceMemory) -> None:
        with _mapped(self._runtime, "close another process's memory of a GPU"):
            self._runtime.ipcCloseMemHandle(memory.address)
