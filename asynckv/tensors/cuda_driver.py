"""What CUDA's driver library says that CuPy and torch do not pass on, by ctypes.

A GPU's UUID: CuPy reads it as a C string, which ends at the first zero byte. And the
capture mode of a thread: while an engine captures a graph, a call such as
``cudaEventQuery`` or ``cudaMalloc`` from *any* thread in the default mode fails, and
the capture with it. A thread in the relaxed mode breaks nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from typing import Any, Final

from asynckv.errors import GPUFailed, GPUUnavailable

__all__ = ("CudaDriver", "open_driver")

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
