"""A GPU that has been opened, and new tensors of it for an application.

Whatever may wait for CUDA is done in a thread: opening it, and making a tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from asynckv.errors import GPUFailed, GPUUnavailable
from asynckv.tensors.device_calls import DeviceCalls
from asynckv.tensors.device_copying import CopyPool
from asynckv.tensors.device_lanes import DeviceLanes
from asynckv.tensors.device_tensors import Gpus
from asynckv.tensors.devices import Device
from asynckv.tensors.on_gpu import KVOnGpu, caught
from asynckv.types import TensorSpec

__all__ = ("OpenDevice", "open_device")


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
