"""Where the demo's processes compute, and in whose memory KV waits and lands.

The parent of both needs no torch, unless there is a GPU to be looked for.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from asynckv.devices.names import Device

__all__ = ("HOST", "Place", "check_place", "place_named")


@dataclasses.dataclass(frozen=True)
class Place:
    """A processor: ``computes_on`` is what torch calls it.

    ``device`` is the GPU that buffers have their memory on; ``None`` for the host's.
    """

    computes_on: str = "cpu"
    device: Device | None = None

    @property
    def name(self) -> str:
        """As it is told to other processes."""
        return "cpu" if self.device is None else self.device.name

    @property
    def is_gpu(self) -> bool:
        """Is KV made on a GPU, rather than brought to one?"""
        return self.computes_on != "cpu"

    def describe(self) -> str:
        """Return its name, with the model of a GPU that computes. Opens it."""
        if not self.is_gpu:
            return self.name
        import torch

        return f"{self.name} ({torch.cuda.get_device_name(self.computes_on)})"

    def settle(self) -> None:
        """Wait, in a thread that computes, until all it was given is done."""
        if self.is_gpu:
            import torch

            torch.cuda.synchronize(self.computes_on)


HOST: Final = Place()
"""The processors and the memory of this host."""


def place_named(name: str) -> Place:
    """Return what ``--device`` means. No GPU is asked.

    :raises ConfigError: there is no such device
    """
    if name == "cpu":
        return HOST
    from asynckv.devices.names import device_named

    device = device_named(name)
    return HOST if device is None else Place(device.name, device)


async def check_place(place: Place) -> None:
    """Make sure that both processes will be able to compute there, and to hand over.

    Waits at most 30 s for a GPU. A cancelled call leaves no trace.

    :raises GPUUnavailable: CuPy, a driver, that GPU or a torch for it is missing
    :raises GPUFailed: CUDA failed, or did not answer
    """
    if place.device is not None:
        from asynckv.devices.opening import open_device

        await open_device(place.device)
