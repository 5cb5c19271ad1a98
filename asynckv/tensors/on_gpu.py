"""A tensor of a GPU, and the moment from which it is ready."""

from __future__ import annotations

import dataclasses

import torch

from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.device_tensors import DeviceTensors, gpu_of
from asynckv.tensors.views import spec_of
from asynckv.types import TensorSpec

__all__ = ("KVOnGpu", "at_once", "caught")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class KVOnGpu:
    """A tensor, and its bytes: they are what the caller's stream was given to make.

    Whoever holds it keeps the tensor.
    """

    tensor: torch.Tensor
    memory: DeviceMemory

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.memory.nbytes

    @property
    def shape(self) -> torch.Size:
        """That of the tensor."""
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        """That of the tensor."""
        return self.tensor.dtype

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype."""
        return spec_of(self.tensor)

    def part(self, start: int, stop: int) -> KVOnGpu:
        """Return the bytes from ``start`` to ``stop``, as a tensor of bytes.

        :raises ValueError: they are not within these
        """
        memory = self.memory.part(start, stop)
        return KVOnGpu(self.tensor.reshape(-1).view(torch.uint8)[start:stop], memory)


def at_once(tensor: torch.Tensor, tensors: DeviceTensors) -> KVOnGpu:
    """Return a tensor of a GPU that is ready, and that no stream is to be waited for.

    :raises ValueError: it is on no GPU, or its memory is not its elements in order
    :raises GPUFailed: CUDA refused
    """
    memory = tensors.memory_of(tensor)
    if memory.ready is not None:
        memory.ready.close()
    return KVOnGpu(tensor, dataclasses.replace(memory, ready=None))


def caught(tensor: torch.Tensor, tensors: DeviceTensors) -> KVOnGpu | None:
    """Mark where the caller's stream is now, if ``tensor`` is on a GPU.

    To be called before the caller is made to wait: a stream is current for as long.

    :raises ValueError: its memory is not its elements in order
    :raises GPUFailed: CUDA refused
    """
    if gpu_of(tensor) is None:
        return None
    return KVOnGpu(tensor, tensors.memory_of(tensor))
