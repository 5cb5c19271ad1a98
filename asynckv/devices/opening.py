"""A GPU that has been opened, and new tensors of it for an application.

Whatever may wait for CUDA is done in a thread: opening it, and making a tensor. An
event loop waits for calls that take their time, but not for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from asynckv.devices.copying import CopyPool
from asynckv.devices.lanes import DeviceLanes
from asynckv.devices.names import Device
from asynckv.devices.tensors import Gpus, KVOnGpu, caught
from asynckv.errors import GPUFailed, GPUUnavailable
from asynckv.types import TensorSpec

__all__ = (
    "DeviceCalls",
    "OpenDevice",
    "open_device",
)


_LIMIT_S: Final = 30.0

_T = TypeVar("_T")


class _Call(Generic[_T]):
    """One call, and what came of it while somebody wants that."""

    def __init__(self, work: Callable[[], _T]) -> None:
        self._work: Callable[[], _T] | None = work
        self._value: _T | None = None
        self._error: BaseException | None = None
        loop = self._loop = asyncio.get_running_loop()
        self.has_returned: asyncio.Future[None] = loop.create_future()

    def run(self) -> None:
        """Make it, in its thread."""
        work, value, error = self._work, None, None
        try:
            value = None if work is None else work()
        except BaseException as exc:  # noqa: BLE001 - result() raises it on the loop
            error = exc
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._end, value, error)

    def result(self) -> _T:
        """Return what it has returned, or raise that."""
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def forget(self) -> None:
        """Nobody wants to know any more: whoever keeps this keeps nothing."""
        self._work = self._value = self._error = None

    def _end(self, value: _T | None, error: BaseException | None) -> None:
        if self._work is not None:
            self._value, self._error = value, error
        self.has_returned.set_result(None)


class DeviceCalls:
    """Calls for one GPU, one at a time, each in a thread of its own.

    One that nobody waits for any more goes on, and what it returns is dropped; no other
    one is made before it has returned.
    """

    def __init__(self, limit_s: float = _LIMIT_S) -> None:
        self._limit_s = limit_s
        self._under_way: asyncio.Future[None] | None = None

    async def call(self, work: Callable[[], _T]) -> _T:
        """Return what ``work`` returns in its thread.

        A cancelled call waits for nothing.

        :raises GPUFailed: it, or the one before it, did not return in time
        :raises Exception: what ``work`` raises
        :raises RuntimeError: the process can have no more threads
        """
        call = _Call(work)
        try:
            await self._make(call)
            return call.result()
        finally:
            call.forget()

    async def _make(self, call: _Call[_T]) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                while self._under_way is not None:
                    await asyncio.wait({self._under_way})
                self._start(call)
                await asyncio.wait({call.has_returned})
        except TimeoutError:
            raise GPUFailed(
                f"CUDA has not answered within {self._limit_s:g} s",
                hint="the GPU or its driver is stuck: nvidia-smi",
            ) from None

    def _start(self, call: _Call[_T]) -> None:
        # No daemon: one that is in torch while the interpreter ends takes it down.
        threading.Thread(target=call.run, name="asynckv-gpu-call", daemon=False).start()
        self._under_way = call.has_returned
        self._under_way.add_done_callback(self._forget)

    def _forget(self, future: object) -> None:
        self._under_way = None


@dataclasses.dataclass(frozen=True)
class OpenDevice:
    """``device``, and CUDA, which torch has started there; ``uuid`` is its name."""

    device: Device
    gpus: Gpus
    uuid: str = ""

    def make_pool(self) -> CopyPool:
        """Make what copies to this GPU and from any, through pinned memory."""
        gpus = self.gpus
        return CopyPool(lanes=DeviceLanes.of(lambda: gpus))

    def maker(self, spec: TensorSpec) -> Callable[[], KVOnGpu]:
        """Return what makes a tensor, in any thread, as if the calling one did.

        The tensor belongs to the stream that is current here now, and is ready to be
        written when that stream has done what it was given before: torch gives out
        again what the stream may still be reading. Never waits.
        """
        tensors, index = self.gpus.tensors, self.device.index
        stream = tensors.current_stream(index)

        def make() -> KVOnGpu:
            try:
                with stream:
                    made = caught(self.device.empty(spec), tensors)
            except RuntimeError as exc:  # what torch raises for errors of CUDA
                raise GPUFailed(
                    f"{self.device.name} has no {spec.nbytes} bytes: {exc}"
                ) from exc
            if made is None:
                raise TypeError(f"{self.device.name} makes tensors of no GPU")
            return made

        return make


async def open_device(device: Device | None) -> OpenDevice | None:
    """Open a GPU, off the event loop; nothing for the CPU.

    Waits at most 30 s. A cancelled call waits for nothing, and keeps nothing.

    :raises GPUUnavailable: CuPy, a driver, that GPU or a torch for it is missing
    :raises GPUFailed: CUDA failed, or did not answer
    """
    if device is None:
        return None

    def start() -> OpenDevice:
        gpus = device.opened()
        try:
            device.empty(TensorSpec((1,), "uint8"))  # torch's start takes its time
        except (AssertionError, RuntimeError) as exc:
            raise GPUUnavailable(
                f"torch cannot use {device.name}: {exc}",
                hint="install a torch that was built for CUDA: https://pytorch.org",
            ) from exc
        return OpenDevice(device, gpus, gpus.cuda.uuid(device.index))

    return await DeviceCalls().call(start)
