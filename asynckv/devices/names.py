"""Which GPU a buffer's memory is on, by the names that users write."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import threading
from collections.abc import Callable
from typing import Final, TypeAlias

import torch

from asynckv.devices.cuda import CudaApi
from asynckv.devices.tensors import Gpus, open_gpus
from asynckv.errors import ConfigError, GPUUnavailable
from asynckv.tensors.views import dtype_of
from asynckv.types import TensorSpec

__all__ = ("Device", "DeviceName", "cuda_of_this_process", "device_named")

_NAME: Final = re.compile(r"cuda(?::([0-9]{1,4}))?\Z")
_RANK: Final = re.compile(r"[0-9]{1,4}\Z")


_lock: Final = threading.Lock()


@functools.cache
def _opened_once() -> Gpus:
    return open_gpus()


def _gpus_of_this_process() -> Gpus:
    """Open them once: what was imported is counted by whom it was imported.

    Who comes meanwhile waits: each would have opened its own.
    """
    with _lock:
        return _opened_once()


def cuda_of_this_process() -> CudaApi:
    """Return the one by which all of this process know who else is at a GPU.

    Imports CuPy, so not on an event loop.

    :raises GPUUnavailable: CuPy, a driver or a GPU is missing
    """
    return _gpus_of_this_process().cuda


@dataclasses.dataclass(frozen=True)
class Device:
    """One GPU, not opened yet: ``index`` is its number in this process.

    ``open`` is called in a thread, once for each buffer; ``ordinary`` makes tensors
    there that are no buffer's.
    """

    index: int
    open: Callable[[], Gpus] = _gpus_of_this_process
    ordinary: Callable[[TensorSpec], torch.Tensor] | None = None

    @property
    def name(self) -> str:
        """As torch calls it."""
        return f"cuda:{self.index}"

    def opened(self) -> Gpus:
        """Open CUDA, and make this GPU the calling thread's. Not on an event loop.

        :raises GPUUnavailable: CuPy, a driver or that GPU is missing
        """
        gpus = self.open()
        count = gpus.cuda.device_count()
        if self.index >= count:
            raise GPUUnavailable(
                f"there is no {self.name}: this process sees {count} GPUs",
                hint="see CUDA_VISIBLE_DEVICES, and the number after cuda:",
            )
        gpus.cuda.use_device(self.index)
        return gpus

    def empty(self, spec: TensorSpec) -> torch.Tensor:
        """Return a tensor that is the application's own, from the first."""
        if self.ordinary is not None:
            return self.ordinary(spec)
        flat = torch.empty(spec.nbytes, dtype=torch.uint8, device=self.name)
        return flat.view(dtype_of(spec.dtype)).view(spec.shape)


DeviceName: TypeAlias = str | torch.device | Device
"""``"cpu"``, ``"cuda"``, ``"cuda:1"``, or torch's device."""


def device_named(
    name: DeviceName | None, *, local_rank: object = None
) -> Device | None:
    """Return the GPU that ``name`` means; ``None`` for the CPU.

    ``"cuda"`` is the GPU of ``local_rank``, a number or its digits: ``LOCAL_RANK`` of
    the environment where it is ``None``, else 0. CUDA is not asked.

    :raises ConfigError: there is no such device, whatever is installed, or no such rank
    """
    if isinstance(name, Device):
        return name
    if name is None or str(name) == "cpu":
        return None
    found = _NAME.match(str(name))
    if found is None:
        raise ConfigError(
            f"device {str(name)!r} is unknown", hint='write "cpu", "cuda" or "cuda:1"'
        )
    number = found.group(1)
    return Device(_checked(local_rank) if number is None else int(number))


def _checked(local_rank: object) -> int:
    given = os.environ.get("LOCAL_RANK", "0") if local_rank is None else local_rank
    if not isinstance(given, int | str) or not _RANK.match(str(given)):
        raise ConfigError(f"local_rank is {given!r}, not the number of a rank")
    return int(given)
