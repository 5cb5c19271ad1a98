"""Tensors of a GPU as plain bytes of it, and the moment from which they are ready.

A seam: :class:`TorchTensors` is it over torch and CuPy,
the fakes of tests/harness without a GPU. Below it nobody knows torch, above it
nobody knows addresses. What is called on a caller's own thread (an event loop's too)
never waits for the GPU.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from asynckv.devices.cuda import CudaApi, DeviceMemory, Event, Stream
from asynckv.devices.cupy import CudaDriver, open_cuda, open_driver
from asynckv.errors import GPUFailed
from asynckv.tensors.views import dtype_of, spec_of
from asynckv.types import TensorSpec

__all__ = (
    "DeviceTensors",
    "Gpus",
    "KVOnGpu",
    "TorchEvent",
    "TorchTensors",
    "at_once",
    "caught",
    "gpu_of",
    "index_rows",
    "open_gpus",
)


class DeviceTensors(Protocol):
    """Tensors of GPUs: where their bytes lie, and when they may be touched."""

    def memory_of(self, tensor: torch.Tensor) -> DeviceMemory:
        """Return the bytes of a contiguous tensor of a GPU, which it owns. Never waits.

        They are ready when all has ended that this thread's current stream of the
        GPU was given until now: reads as well, so that they may be written then.
        Whoever moves them asks ``ready`` for that: streams of CUDA cannot wait for it.

        :raises ValueError: it is not on a GPU, or its memory is not its elements
            in order
        :raises GPUFailed: CUDA refused
        """

    def tensor_over(self, memory: DeviceMemory, spec: TensorSpec) -> torch.Tensor:
        """Return a tensor whose memory is the first bytes of ``memory``, not copied.

        It keeps the owner of ``memory`` alive, as its views do. On no event loop:
        the first one makes torch start CUDA.

        :raises ValueError: there are too few bytes, or this torch lacks the dtype
        """

    def move_rows(
        self,
        table: torch.Tensor,
        ids: DeviceMemory,
        packed: DeviceMemory,
        stream: Stream,
        *,
        is_gathered: bool,
    ) -> None:
        """Queue the copy of rows ``ids`` of ``table``, in order, to ``packed``.

        Or back, where it is not ``is_gathered``: then no id is there twice. ``table``
        has two dimensions and bytes for elements, and rows that are contiguous but may
        lie apart; ids have 64 bits. All of it is one GPU's, and stays until ``stream``
        has done it. Never waits, but a first call may: it loads.

        :raises GPUFailed: CUDA refused
        """

    def current_stream(self, device: int) -> AbstractContextManager[object]:
        """Return this thread's current stream, for another thread to make its own.

        It is that thread's while it is entered. CUDA was started by torch before.
        """

    def stream_of(self, device: int) -> object:
        """Return this thread's current stream, for :meth:`mark`; equal if the same."""

    def mark(self, stream: object) -> Event:
        """Mark what :meth:`stream_of` has returned was given until now. Never waits.

        In any thread. Who gets the mark closes it. Streams of CUDA cannot wait for it.

        :raises GPUFailed: CUDA refused
        """


@dataclasses.dataclass(frozen=True)
class Gpus:
    """The GPUs of this process: CUDA, and tensors on it.

    ``open_nccl`` returns the :class:`~asynckv.transports.nccl.api.NcclApi` that goes
    with them; without it that is the real one.
    """

    cuda: CudaApi
    tensors: DeviceTensors
    open_nccl: Callable[[], object] | None = None


def gpu_of(tensor: torch.Tensor) -> int | None:
    """Return the number of the GPU that ``tensor`` is on; ``None`` for any other place.

    CUDA is not asked.
    """
    device = tensor.device
    return device.index if device.type == "cuda" else None


def open_gpus() -> Gpus:
    """Return the real ones. Imports CuPy, so not on an event loop.

    :raises GPUUnavailable: CuPy, a driver or a GPU is missing
    """
    return Gpus(open_cuda(), TorchTensors())


class TorchEvent:
    """A mark in one of torch's own streams; CUDA's other streams do not wait for it."""

    def __init__(self, mark: torch.cuda.Event, driver: CudaDriver) -> None:
        self._mark: torch.cuda.Event | None = mark
        self._driver = driver

    def record(self, stream: Stream) -> None:
        raise TypeError("an event of torch's is recorded by torch")

    def query(self) -> bool:
        if self._mark is None:
            return True
        try:
            with self._driver.capture_relaxed():  # polled on the caller's loop too
                return bool(self._mark.query())  # type: ignore[no-untyped-call]
        except RuntimeError as exc:  # what torch raises for errors of CUDA
            raise GPUFailed(f"work on the GPU failed: {exc}") from exc

    def synchronize(self) -> None:
        if self._mark is not None:
            try:
                with self._driver.capture_relaxed():  # in a thread of a copy pool
                    self._mark.synchronize()
            except RuntimeError as exc:
                raise GPUFailed(f"work on the GPU failed: {exc}") from exc

    def close(self) -> None:
        self._mark = None


class TorchTensors:
    """:class:`DeviceTensors` of torch. CuPy is not needed for them."""

    def memory_of(self, tensor: torch.Tensor) -> DeviceMemory:
        device = gpu_of(tensor)
        if device is None:
            raise ValueError(f"a tensor on {tensor.device} is on no GPU")
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise ValueError("the memory of the tensor is not its elements in order")
        nbytes = tensor.numel() * tensor.element_size()
        ready = self.mark(self.stream_of(device))
        return DeviceMemory(tensor.data_ptr(), nbytes, device, tensor, ready)

    def tensor_over(self, memory: DeviceMemory, spec: TensorSpec) -> torch.Tensor:
        dtype = dtype_of(spec.dtype)
        if memory.nbytes < spec.nbytes:
            raise ValueError(f"{memory.nbytes} bytes cannot hold {spec.nbytes}")
        device = torch.device("cuda", memory.device)
        if not spec.nbytes:
            return torch.empty(spec.shape, dtype=dtype, device=device)
        lent = torch.as_tensor(_GpuBytes(memory, spec.nbytes), device=device)
        return lent.view(dtype).view(spec.shape)

    def move_rows(
        self,
        table: torch.Tensor,
        ids: DeviceMemory,
        packed: DeviceMemory,
        stream: Stream,
        *,
        is_gathered: bool,
    ) -> None:
        index = self.tensor_over(ids, TensorSpec((ids.nbytes // 8,), "int64"))
        landing = self.tensor_over(packed, TensorSpec((packed.nbytes,), "uint8"))
        device = torch.device("cuda", packed.device)
        ours = torch.cuda.ExternalStream(stream.handle, device=device)  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.stream(ours), torch.inference_mode():
                index_rows(table, index, landing, is_gathered=is_gathered)
        except RuntimeError as exc:  # what torch raises for errors of CUDA
            raise GPUFailed(f"move rows of a table: {exc}") from exc

    def current_stream(self, device: int) -> AbstractContextManager[object]:
        stream = torch.cuda.current_stream(device)
        return torch.cuda.stream(stream)

    def stream_of(self, device: int) -> object:
        return torch.cuda.current_stream(device)

    def mark(self, stream: object) -> Event:
        if not isinstance(stream, torch.cuda.Stream):
            raise TypeError(f"not a stream of torch's: {stream!r}")
        # Recorded by torch: it switches to the stream's GPU, whose default stream has
        # the same handle as those of all others.
        mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        try:
            mark.record(stream)
        except RuntimeError as exc:  # what torch raises for errors of CUDA
            raise GPUFailed(f"mark a stream: {exc}") from exc
        return TorchEvent(mark, open_driver())


def index_rows(
    table: torch.Tensor, ids: torch.Tensor, packed: torch.Tensor, *, is_gathered: bool
) -> None:
    """Copy rows ``ids`` of ``table`` to ``packed``, or back; both have bytes.

    As elements that are as wide as both allow: torch copies single bytes at a quarter
    of the rate. ``packed`` is contiguous; what is queued is the current stream's.
    """
    rows, row = len(ids), table.shape[1]
    places = table.data_ptr(), packed.data_ptr()
    width = math.gcd(row, table.stride(0), table.storage_offset(), *places, 8)
    element = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[width]
    elements, flat = table.view(element), packed.view(element).view(rows, row // width)
    if is_gathered:
        torch.index_select(elements, 0, ids, out=flat)
    else:
        elements.index_copy_(0, ids, flat)


class _GpuBytes:
    """Bytes of a GPU as torch takes them: as uint8, which every dtype can be seen as.

    Torch's tensor refers to this object, and so to the memory's owner.
    """

    def __init__(self, memory: DeviceMemory, nbytes: int) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "strides": None,
            "version": 3,
        }


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
