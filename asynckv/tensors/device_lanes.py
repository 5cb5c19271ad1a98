"""What a thread needs to move bytes of one GPU: a stream, pinned memory, events.

Made when a thread needs one that nobody else has, and kept. Rule of this file: nothing
runs on an event loop.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Final

from asynckv.errors import GPUFailed
from asynckv.tensors.cuda import CudaApi, Event, PinnedMemory
from asynckv.tensors.device_tensors import Gpus

__all__ = ("SLOT_NBYTES", "DeviceLane", "DeviceLanes")

SLOT_NBYTES: Final = 4 * 2**20
"""Of each of the two pinned buffers: one is filled while the other is on its way."""


class DeviceLane:
    """One thread's stream on a GPU, and two slots of pinned memory."""

    def __init__(self, cuda: CudaApi) -> None:
        self.cuda = cuda
        self.stream = cuda.stream()
        self._events: tuple[Event, ...] = (cuda.event(), cuda.event())
        self._slots: list[PinnedMemory] = []
        self._next = 0

    def slot(self) -> tuple[PinnedMemory, Event]:
        """Return the next slot, when what was queued with it before has ended.

        Whoever queues something with it records the event behind that.
        """
        if len(self._slots) < len(self._events):
            self._slots.append(self.cuda.host_alloc(SLOT_NBYTES))
        number, self._next = self._next, (self._next + 1) % len(self._events)
        event = self._events[number]
        event.synchronize()
        return self._slots[number], event

    def close(self) -> None:
        """Give all of it back. Nothing is queued any more."""
        with contextlib.suppress(GPUFailed):  # else its context is gone, with all of it
            self.stream.close()
            for event in self._events:
                event.close()
            while self._slots:
                self.cuda.host_free(self._slots.pop())


class DeviceLanes:
    """Lanes of one GPU, for any number of threads. ``opened`` opens CUDA."""

    def __init__(self, opened: Callable[[], Gpus]) -> None:
        self._opened = opened
        self._gpus: Gpus | None = None
        self._lock = threading.Lock()
        self._idle: list[DeviceLane] = []
        self._is_closed = False

    @contextlib.contextmanager
    def lane(self, device: int) -> Iterator[DeviceLane]:
        """Use a lane in this thread, whose device it becomes.

        When it ends, also by an error, nothing that was queued is under way.

        :raises GPUUnavailable: there is no GPU
        :raises GPUFailed: the GPU failed; what was queued may be half done
        """
        gpus = self._gpus = self._gpus or self._opened()
        gpus.cuda.use_device(device)
        with self._lock:
            lane = self._idle.pop() if self._idle else None
        lane = lane or DeviceLane(gpus.cuda)
        try:
            yield lane
        finally:
            lane.stream.synchronize()  # a lane that fails here is used no more
            self._give_back(lane)

    def close(self) -> None:
        """Give everything back; lanes in use with their end. In a thread."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for lane in idle:
            lane.close()

    def _give_back(self, lane: DeviceLane) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(lane)
                return
        lane.close()
