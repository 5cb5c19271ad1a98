"""Tensors of GPUs that are not there.

They say that they are on a GPU, and lie in the memory of a fake process: what reads
them as if they were the host's is refused as torch refuses it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from asynckv import GPUFailed, TensorSpec
from asynckv.devices.cuda import DeviceMemory, Event, Stream
from asynckv.devices.tensors import Gpus, gpu_of
from asynckv.tensors.views import tensor_over
from harness.fake_gpus.cuda import ours
from harness.fake_gpus.fabric import FakeProcess
from harness.fake_gpus.streams import FakeTorchEvent, FakeTorchStream, Rows

__all__ = ("FakeTensor", "FakeTensors", "fake_gpus_of")


class FakeTensor(torch.Tensor):
    """A tensor that says it is on a GPU. What is made of it says so too."""

    gpu: int = 0
    memory: DeviceMemory | None = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        source = args[0] if args else None
        if isinstance(made, FakeTensor) and isinstance(source, FakeTensor):
            made.gpu = source.gpu
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.gpu)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def cpu(self, *args: object, **options: object) -> torch.Tensor:
        """Copy it to the host at once, as torch does."""
        plain = self.as_subclass(torch.Tensor)
        if plain.dtype is torch.complex32 and plain.is_contiguous():
            # By way of bytes: torch warns about every new complex32.
            return (
                plain.reshape(-1)
                .view(torch.uint8)
                .clone()
                .view(plain.dtype)
                .view(plain.shape)
            )
        return plain.clone()

    def to(self, *args: Any, **options: Any) -> torch.Tensor:
        """As :meth:`cpu`, if that is where it is to go."""
        target = options.get("device", args[0] if args else None)
        if isinstance(target, str | torch.device) and str(target) == "cpu":
            return self.cpu()
        return super().to(*args, **options)


class FakeTensors:
    """Fits :class:`~asynckv.devices.tensors.DeviceTensors`.

    Each GPU has a current stream: :meth:`stream`. A thread may have another one, by
    :meth:`use_stream`.
    """

    def __init__(self, process: FakeProcess) -> None:
        self._process = process
        self._streams: dict[int, FakeTorchStream] = {}
        self._own = threading.local()
        self._lock = threading.Lock()

    def stream(self, device: int) -> FakeTorchStream:
        """Return the stream that this thread uses."""
        own: FakeTorchStream | None = getattr(self._own, "stream", None)
        if own is not None and own.device == device:
            return own
        with self._lock:
            if device not in self._streams:
                self._streams[device] = self.new_stream(device)
            return self._streams[device]

    def new_stream(self, device: int) -> FakeTorchStream:
        """Make one more, as ``torch.cuda.Stream()`` does."""
        with self._process.cuda.on(device):
            return self._process.cuda.torch_stream()

    @contextlib.contextmanager
    def use_stream(self, stream: FakeTorchStream) -> Iterator[None]:
        """Make it this thread's current one, as ``torch.cuda.stream()`` does."""
        before = getattr(self._own, "stream", None)
        self._own.stream = stream
        try:
            yield
        finally:
            self._own.stream = before

    def empty(self, spec: TensorSpec, device: int = 0) -> torch.Tensor:
        """Allocate a tensor; it stays until its process ends."""
        with self._process.cuda.on(device):
            memory = self._process.cuda.pooled(max(spec.nbytes, 1))
        return self.tensor_over(memory, spec)

    def on_gpu(self, tensor: torch.Tensor, device: int = 0) -> torch.Tensor:
        """Return a copy on a GPU."""
        name = str(tensor.dtype).removeprefix("torch.")
        made = self.empty(TensorSpec(tuple(tensor.shape), name), device)
        made.as_subclass(torch.Tensor).copy_(tensor)
        return made

    def memory_of(self, tensor: torch.Tensor) -> DeviceMemory:
        device = gpu_of(tensor)
        if device is None:
            raise ValueError(f"a tensor on {tensor.device} is on no GPU")
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise ValueError("the memory of the tensor is not its elements in order")
        nbytes = tensor.numel() * tensor.element_size()
        ready = self.mark(self.stream(device))
        address = self._address(tensor.data_ptr(), nbytes)
        return DeviceMemory(address, nbytes, device, tensor, ready)

    def tensor_over(self, memory: DeviceMemory, spec: TensorSpec) -> torch.Tensor:
        if memory.nbytes < spec.nbytes:
            raise ValueError(f"{memory.nbytes} bytes cannot hold {spec.nbytes}")
        flat = tensor_over(self._process.cuda.view(memory), spec)
        made = flat.as_subclass(FakeTensor)
        made.gpu = memory.device
        made.memory = memory
        return made

    def move_rows(
        self,
        table: torch.Tensor,
        ids: DeviceMemory,
        packed: DeviceMemory,
        stream: Stream,
        *,
        is_gathered: bool,
    ) -> None:
        cuda, space = self._process.cuda, self._process.space
        if ids.nbytes // 8 * table.shape[1] != packed.nbytes or ids.address % 8:
            raise GPUFailed("ids and bytes do not fit each other, or lie askew", code=1)
        extent = (len(table) - 1) * table.stride(0) + table.shape[1]
        address = self._address(table.data_ptr(), extent)
        places = (address, extent), (ids.address, ids.nbytes)
        shape = len(table), table.shape[1], table.stride(0)
        ticks = self._process.gpus.delay()
        rows = Rows(
            *(space, (*places, (packed.address, packed.nbytes)), shape, ticks),
            is_gathered=is_gathered,
        )
        cuda.launches += 1
        ours(stream).add(rows)

    def current_stream(self, device: int) -> contextlib.AbstractContextManager[object]:
        return self.use_stream(self.stream(device))

    def stream_of(self, device: int) -> object:
        return self.stream(device)

    def mark(self, stream: object) -> Event:
        if not isinstance(stream, FakeTorchStream):
            raise TypeError(f"not a stream of torch's: {stream!r}")
        event = self._process.cuda.event()
        event.record_any(stream)
        return FakeTorchEvent(event)

    def _address(self, place: int, nbytes: int) -> int:
        """Return what the GPU calls memory that lies at ``place`` here."""
        space = self._process.space
        for allocation in space.allocations():
            start = place - int(allocation.array.ctypes.data)
            is_within = 0 <= start <= allocation.array.nbytes - nbytes
            if allocation.device >= 0 and is_within:
                return space.bases_of(allocation)[0] + start
        if not nbytes:
            return 0
        raise GPUFailed("a tensor that lies in no memory of this process's GPUs")


def fake_gpus_of(process: FakeProcess) -> Gpus:
    """Return what a process has in place of real GPUs."""
    return Gpus(process.cuda, FakeTensors(process))
