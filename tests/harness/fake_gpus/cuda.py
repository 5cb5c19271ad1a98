"""CUDA's runtime, as one process sees it."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

import numpy

from asynckv.devices.cuda import DeviceMemory, PinnedMemory, Stream
from asynckv.errors import GPUFailed
from harness.fake_gpus.memory import Allocation, Bytes
from harness.fake_gpus.streams import (
    Copy,
    FakeEvent,
    FakeStream,
    FakeTorchStream,
)

if TYPE_CHECKING:
    from harness.fake_gpus.fabric import FakeProcess

__all__ = ("FakeCuda", "ours")

_Stream = TypeVar("_Stream", bound=FakeStream)


class FakeCuda:
    """Fits :class:`~asynckv.devices.cuda.CudaApi`."""

    def __init__(self, process: FakeProcess) -> None:
        self._process = process
        self._gpus = process.gpus
        self._space = process.space
        self._thread = threading.local()
        self._handles = itertools.count(1)
        self._opened: dict[tuple[int, bytes], int] = {}
        self.launches = 0
        """How often rows were gathered or scattered: one kernel each."""

    def device_count(self) -> int:
        return len(self._gpus.uuids)

    def uuid(self, device: int) -> str:
        return self._gpus.uuids[device]

    @property
    def device(self) -> int:
        """This thread's; 0 if it has never said."""
        return int(getattr(self._thread, "device", 0))

    def use_device(self, device: int) -> None:
        if not 0 <= device < self.device_count():
            raise GPUFailed(f"there is no GPU {device}", code=101)
        self._thread.device = device
        self._thread.is_relaxed = True

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Let this thread be on ``device``, as torch does: not relaxed by that."""
        before, self._thread.device = self.device, device
        try:
            yield
        finally:
            self._thread.device = before

    def check_capture(self, what: str) -> None:
        """Note a call that would break a graph which another thread captures now.

        Somebody always does. A test's own thread may: it captures nothing.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main and not getattr(self._thread, "is_relaxed", False):
            self._gpus.note(f"{what} in a thread that would break the engine's capture")

    def malloc(self, nbytes: int) -> DeviceMemory:
        self.check_capture("memory was allocated")
        return self.pooled(nbytes)

    def pooled(self, nbytes: int) -> DeviceMemory:
        """Allocate as torch does, which is relaxed where it has to be."""
        with self._gpus.lock:
            self._note_wait_for_gpu("allocated")
            fresh = numpy.full(nbytes, 0xCD, numpy.uint8)
            allocation = Allocation(fresh, self.device)
            self._process.owned.append(allocation)
            return DeviceMemory(self._space.map(allocation), nbytes, self.device)

    def free(self, memory: DeviceMemory) -> None:
        with self._gpus.lock:
            self._note_wait_for_gpu("freed")
            self.drop(memory)

    def drop(self, memory: DeviceMemory) -> None:
        """Free memory as a pool does: no work of the GPU is waited for."""
        with self._gpus.lock:
            allocation = self._space.unmap(memory.address)
            if allocation not in self._process.owned:
                raise GPUFailed("the process has ended, and its memory with it", code=4)
            if allocation.users:
                self._gpus.note("memory was freed while a copy was under way")
            if allocation in self._process.owned:  # else its process has died
                self._process.owned.remove(allocation)
                allocation.drop()

    def adopt(self, view: memoryview, device: int) -> DeviceMemory:
        """Let memory of the host be a GPU's, as no program could: for tests.

        Until :meth:`disown`; its owner sees what the GPU writes.
        """
        with self._gpus.lock:
            allocation = Allocation(numpy.frombuffer(view, numpy.uint8), device)
            return DeviceMemory(self._space.map(allocation), view.nbytes, device)

    def disown(self, memory: DeviceMemory) -> None:
        """Nothing of the GPU may be at it any more."""
        with self._gpus.lock:
            allocation = self._space.unmap(memory.address)
            if allocation.users:
                self._gpus.note("memory was taken back while a copy was under way")
            allocation.array, allocation.is_gone = numpy.empty(0, numpy.uint8), True

    def host_alloc(self, nbytes: int) -> PinnedMemory:
        return self._pin(numpy.zeros(nbytes, numpy.uint8))

    def host_free(self, memory: PinnedMemory) -> None:
        with self._gpus.lock:
            allocation = self._space.unmap(memory.address)
            if allocation.users:
                self._gpus.note("pinned memory was let go while a copy was under way")
            allocation.is_gone = True

    def stream(self) -> FakeStream:
        return self._made(FakeStream)

    def torch_stream(self) -> FakeTorchStream:
        """Make a stream of torch's."""
        return self._made(FakeTorchStream)

    def _made(self, kind: type[_Stream]) -> _Stream:
        with self._gpus.lock:
            handle = next(self._handles)
            stream = kind(self._process, self.device, handle)
            self._process.streams[handle] = stream
            return stream

    def event(self) -> FakeEvent:
        return FakeEvent(self._gpus)

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        with self._gpus.lock:
            for address in (target, source):
                self._space.find(address, nbytes)
            ours(stream).add(
                Copy(self._space, target, source, nbytes, self._gpus.delay())
            )

    def export(self, memory: DeviceMemory) -> bytes:
        with self._gpus.lock:
            allocation, offset = self._space.find(memory.address, memory.nbytes)
            if offset or allocation not in self._process.owned:
                raise GPUFailed("only an allocation of one's own has a handle", code=1)
            return self._gpus.handle_of(allocation, self._process.key)

    def open_memory(self, handle: bytes, nbytes: int) -> DeviceMemory:
        with self._gpus.lock:
            self.check_capture("memory was opened")
            key = self.device, handle
            if key in self._opened:
                raise GPUFailed("this allocation is open here already", code=1)
            allocation = self._gpus.open_handle(handle, nbytes, self._process)
            self._opened[key] = address = self._space.map(allocation)
            return DeviceMemory(address, nbytes, self.device)

    def close_memory(self, memory: DeviceMemory) -> None:
        with self._gpus.lock:
            if memory.address not in self._opened.values():
                raise GPUFailed("this was not opened here", code=1)
            allocation = self._space.unmap(memory.address)
            if self._space.uses(allocation):  # its owner may
                self._gpus.note("memory was closed while a copy was under way")
            self._opened = {
                key: address
                for key, address in self._opened.items()
                if address != memory.address
            }

    def view(self, memory: DeviceMemory) -> Bytes:
        """Look at the bytes where they lie, as no program could: for tests."""
        with self._gpus.lock:
            allocation, offset = self._space.find(memory.address, memory.nbytes)
            return allocation.array[offset : offset + memory.nbytes]

    def _pin(self, array: Bytes) -> PinnedMemory:
        with self._gpus.lock:
            self.check_capture("memory was pinned")
            address = self._space.map(Allocation(array, -1), int(array.ctypes.data))
            return PinnedMemory(address, memoryview(array.data).cast("B"))

    def _note_wait_for_gpu(self, what: str) -> None:
        if self._process.waits_for_peers(self.device):
            self._gpus.note(
                f"memory was {what} while an operation waits for its peer: "
                "a GPU would have made this thread wait for it too"
            )


def ours(stream: Stream) -> FakeStream:
    if not isinstance(stream, FakeStream):
        raise TypeError(f"not a stream of these GPUs: {stream!r}")
    return stream
