"""What asynckv asks of CUDA: memory, streams, events, copies, handles. Nothing else.

Protocols only: :mod:`asynckv.devices.cupy` is them over CuPy, and
the fakes of tests/harness without a GPU. Addresses are numbers, and memory is
bytes: what dtype they have is nobody's business here. A call that CUDA refuses
raises :exc:`~asynckv.errors.GPUFailed`. Nothing may be called on an event loop's
thread but what says that it does not wait.
"""

from __future__ import annotations

import dataclasses
from typing import Final, Protocol

__all__ = (
    "IPC_HANDLE_NBYTES",
    "CudaApi",
    "DeviceMemory",
    "Event",
    "PinnedMemory",
    "Stream",
)

IPC_HANDLE_NBYTES: Final = 64


class Event(Protocol):
    """A mark in a stream: fires when all that was queued before it has ended."""

    def record(self, stream: Stream) -> None:
        """Set the mark behind what is queued on ``stream`` now. Never waits."""

    def query(self) -> bool:
        """Whether it has fired, or was never recorded. Never waits.

        :raises GPUFailed: the work before it failed
        """

    def synchronize(self) -> None:
        """Block this thread until it has fired."""

    def close(self) -> None:
        """Give it back. A second call does nothing."""


class Stream(Protocol):
    """Work of one GPU that runs in order, beside the default stream."""

    @property
    def handle(self) -> int:
        """What CUDA and NCCL call it."""

    def wait(self, event: Event) -> None:
        """Let what is queued from here on begin when ``event`` has fired.

        This thread does not wait for it.
        """

    def synchronize(self) -> None:
        """Block this thread until all that was queued has ended."""

    def close(self) -> None:
        """Give it back; what is queued still runs. A second call does nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Flat bytes on one GPU.

    ``owner`` is whatever keeps them allocated (a tensor): whoever moves them holds it
    until the event of the move has fired. They are not read before ``ready`` has.
    """

    address: int
    nbytes: int
    device: int
    owner: object = dataclasses.field(default=None, repr=False, compare=False)
    ready: Event | None = dataclasses.field(default=None, repr=False, compare=False)

    def part(self, start: int, stop: int) -> DeviceMemory:
        """Return the bytes from ``start`` to ``stop``, which keep the same owner.

        :raises ValueError: they are not within these
        """
        if not 0 <= start <= stop <= self.nbytes:
            raise ValueError(f"{start} to {stop} of {self.nbytes} bytes")
        address = self.address + start
        return dataclasses.replace(self, address=address, nbytes=stop - start)


@dataclasses.dataclass(frozen=True, slots=True)
class PinnedMemory:
    """Host memory that a GPU reads and writes while no thread waits for it."""

    address: int
    view: memoryview = dataclasses.field(repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """How many bytes there are."""
        return self.view.nbytes


class CudaApi(Protocol):
    """CUDA's runtime, as far as asynckv needs it.

    Each thread has a device of its own, which :meth:`use_device` sets: memory,
    streams and events are made there.
    """

    def device_count(self) -> int:
        """How many GPUs this process sees."""

    def uuid(self, device: int) -> str:
        """Name the GPU itself: its number differs from process to process."""

    def use_device(self, device: int) -> None:
        """Make ``device`` this thread's, which is one of asynckv's own.

        From then on nothing it calls breaks the graph that another thread captures.
        """

    def malloc(self, nbytes: int) -> DeviceMemory:
        """Allocate by plain ``cudaMalloc``, never from a pool: it can be exported.

        May wait for all work of the GPU: not while something is on its way.
        """

    def free(self, memory: DeviceMemory) -> None:
        """Free what :meth:`malloc` returned. May wait for all work of the GPU."""

    def host_alloc(self, nbytes: int) -> PinnedMemory:
        """Allocate pinned memory."""

    def host_free(self, memory: PinnedMemory) -> None:
        """Free what :meth:`host_alloc` returned: no view of it may be left."""

    def stream(self) -> Stream:
        """Make a stream that never waits for the default one (non-blocking)."""

    def event(self) -> Event:
        """Make an event, without timing."""

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Queue a copy between addresses on any GPU or in pinned memory. Never waits.

        Other host memory would make it wait: it goes through pinned memory.
        """

    def export(self, memory: DeviceMemory) -> bytes:
        """Return the handle of an allocation, that is of its very beginning.

        It must live until every process that has opened it has closed it.
        """

    def open_memory(self, handle: bytes, nbytes: int) -> DeviceMemory:
        """Map another process's allocation; once for each allocation and process.

        :raises GPUFailed: it is this process's own, is open here already, or is gone
        """

    def close_memory(self, memory: DeviceMemory) -> None:
        """Unmap what :meth:`open_memory` returned; nothing may use it any more."""
