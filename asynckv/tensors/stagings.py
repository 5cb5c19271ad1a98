"""Copies of which one end, or both, is on a GPU: by way of pinned memory."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

import torch

from asynckv.errors import GPUFailed
from asynckv.tensors.cuda import CudaApi
from asynckv.tensors.device_blocks import DeviceBlocks
from asynckv.tensors.device_tensors import DeviceTensors, TorchTensors, gpu_of
from asynckv.tensors.devices import cuda_of_this_process
from asynckv.tensors.on_gpu import KVOnGpu, caught
from asynckv.tensors.runs import AnyMemory, Staged, copied, pieces_of
from asynckv.tensors.staging import CHUNK_NBYTES, SLOTS, Staging

__all__ = ("Stagings",)

logger = logging.getLogger(__name__)

_PIECE_NBYTES: Final = 2**20

_T = TypeVar("_T")


class Stagings:
    """The staging of each GPU that somebody's tensors are on; opened when it is used.

    Without a tensor of a GPU it does nothing, and imports nothing.
    """

    def __init__(
        self,
        open_cuda: Callable[[], CudaApi] = cuda_of_this_process,
        tensors: DeviceTensors | None = None,
        *,
        chunk_nbytes: int = CHUNK_NBYTES,
        slots: int = SLOTS,
        limit_s: float = 30.0,
    ) -> None:
        self.tensors: DeviceTensors = tensors or TorchTensors()
        self._open_cuda = open_cuda
        self._chunk_nbytes, self._slots, self._limit_s = chunk_nbytes, slots, limit_s
        self._lock = threading.Lock()
        self._by_device: dict[int, Staging] = {}
        self._blocks: dict[int, DeviceBlocks] = {}
        self._is_closed = False

    def catch(self, memory: _T, *, is_written: bool = False) -> _T | KVOnGpu:
        """Return what stands for a tensor of a GPU from now on; anything else as it is.

        What is only read may have any strides: it is copied on its GPU first, in the
        caller's stream. Never waits; see :func:`~asynckv.tensors.on_gpu.caught`.

        :raises ValueError: what is to be written is not contiguous
        """
        if not isinstance(memory, torch.Tensor) or gpu_of(memory) is None:
            return memory
        tensor = memory.detach()
        if not is_written:
            tensor = tensor.resolve_conj().resolve_neg().contiguous()
        return caught(tensor, self.tensors) or memory

    def reader(self, source: KVOnGpu) -> Staged:
        """Return memory to read a tensor of a GPU through."""
        return self._staging(source.memory.device).reader(source.memory)

    def writer(self, target: KVOnGpu) -> Staged:
        """Return memory to write a tensor of a GPU through."""
        return self._staging(target.memory.device).writer(target.memory)

    def blocks(self, device: int) -> DeviceBlocks:
        """Return what gathers and scatters blocks of a GPU."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the staging of GPUs is closed")
            if device not in self._blocks:
                self._blocks[device] = DeviceBlocks(
                    self._open_cuda,
                    device,
                    chunk_nbytes=self._chunk_nbytes,
                    limit_s=self._limit_s,
                )
            return self._blocks[device]

    def pieces(
        self, source: AnyMemory | KVOnGpu, target: AnyMemory | KVOnGpu | None
    ) -> Iterator[memoryview]:
        """Copy piece by piece, and yield each piece's bytes while they are hot.

        It waits, in a thread. Exhausted or closed: no GPU is at either end any more.

        :raises GPUUnavailable: CuPy, a driver or a GPU is missing
        :raises GPUFailed: CUDA failed; the target holds anything
        """
        with contextlib.ExitStack() as left:
            origin = self._opened(source, left, self.reader)
            if target is None:
                yield from _read(origin)
                return
            landing = self._opened(target, left, self.writer)
            yield from copied(origin, landing, _PIECE_NBYTES)
            if isinstance(landing, Staged):
                landing.finish()

    def close(self) -> None:
        """Give all pinned memory back, when no copy is under way. Never waits."""
        with self._lock:
            self._is_closed = True
            for staging in self._by_device.values():
                staging.close()
            blocks, self._blocks = list(self._blocks.values()), {}
        for one in blocks:  # CUDA may wait for the whole GPU
            name = f"asynckv-gpu-{one.device}-close"
            threading.Thread(
                target=_close, args=(one,), name=name, daemon=False
            ).start()

    def _opened(
        self,
        memory: AnyMemory | KVOnGpu,
        left: contextlib.ExitStack,
        window: Callable[[KVOnGpu], Staged],
    ) -> AnyMemory:
        if not isinstance(memory, KVOnGpu):
            return memory
        opened = window(memory)
        left.callback(opened.wait_until_quiet)
        return opened

    def _staging(self, device: int) -> Staging:
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the staging of GPUs is closed")
            found = self._by_device.get(device)
            if found is None:
                found = self._by_device[device] = Staging(
                    self._open_cuda,
                    device,
                    chunk_nbytes=self._chunk_nbytes,
                    slots=self._slots,
                    limit_s=self._limit_s,
                )
            return found


def _close(blocks: DeviceBlocks) -> None:
    try:
        blocks.close()
    except GPUFailed as exc:  # its context is gone, and all memory with that
        logger.warning("GPU %d took its memory back badly: %s", blocks.device, exc)


def _read(origin: AnyMemory) -> Iterator[memoryview]:
    start = 0
    while start < origin.nbytes:
        stop = min(start + _PIECE_NBYTES, origin.nbytes)
        if isinstance(origin, Staged):
            stop = min(stop, origin.reach(start))
        yield from pieces_of(origin, start, stop)
        start = stop
