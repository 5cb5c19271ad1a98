"""What a pipe has received, brought to the GPU where it wants it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from asynckv.pipes.gpu_side import GpuSide
from asynckv.tensors.copying import CopyPool
from asynckv.tensors.device_calls import DeviceCalls
from asynckv.tensors.open_device import OpenDevice
from asynckv.tensors.views import spec_of

__all__ = ("Placing",)


class Placing:
    """Copies of one pipe's tensors on ``device``, made by ``pool``.

    They are in memory of ``gpus`` where it has room: to allocate may wait for work of
    the GPU that waits for the peer.
    """

    def __init__(
        self, device: OpenDevice, pool: CopyPool, gpus: Callable[[], GpuSide | None]
    ) -> None:
        self._device = device
        self._gpus = gpus
        self._pool = pool
        self._calls = DeviceCalls()

    async def place(
        self, tensor: torch.Tensor, check: Callable[[], None]
    ) -> torch.Tensor:
        """Return a copy on the GPU, which has ended, for the caller's current stream.

        ``check`` is called before bytes move: it raises if nobody wants them any more.
        A cancelled call ends when no GPU and no thread is at either of the two.

        :raises GPUFailed: the GPU has no memory left, failed, or did not answer
        """
        spec, gpus = spec_of(tensor), self._gpus()
        made = None if gpus is None else gpus.made(spec)
        if made is None:
            made = await self._calls.call(self._device.maker(spec))
            check()
        await self._pool.copy([tensor], [made], digest=False)
        return made.tensor
