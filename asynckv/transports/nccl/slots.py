"""Staging: memory of the GPU, and as much that is pinned, for bytes of the host.

All of it is allocated before the first operation and freed after the last: either may
wait for all that the GPU does.
"""

from __future__ import annotations

import dataclasses

from asynckv.tensors.cuda import CudaApi, DeviceMemory, PinnedMemory

__all__ = ("Slot", "SlotPool")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """Where one operation's bytes are on their way."""

    device: DeviceMemory
    pinned: PinnedMemory


class SlotPool:
    """Slots of one size. Allocated and freed on the worker, used on the loop."""

    def __init__(self, count: int, nbytes: int) -> None:
        self._count = count
        self._nbytes = nbytes
        self._slots: list[Slot] = []
        self._free: list[Slot] = []

    @property
    def free_count(self) -> int:
        """How many nobody uses."""
        return len(self._free)

    def allocate(self, cuda: CudaApi) -> None:
        """Allocate them on this thread's device.

        :raises GPUFailed: there is not so much memory; none is kept
        """
        try:
            for _ in range(self._count):
                device = cuda.malloc(self._nbytes)
                try:
                    pinned = cuda.host_alloc(self._nbytes)
                except BaseException:
                    cuda.free(device)
                    raise
                self._slots.append(Slot(device, pinned))
        except BaseException:
            self.free(cuda)
            raise
        self._free = list(self._slots)

    def take(self) -> Slot | None:
        """Return one that nobody uses, if there is one."""
        return self._free.pop() if self._free else None

    def give(self, slot: Slot) -> None:
        """Nobody uses it any more."""
        self._free.append(slot)

    def free(self, cuda: CudaApi) -> None:
        """Free them all: nothing moves any more."""
        slots, self._slots, self._free = self._slots, [], []
        for slot in slots:
            cuda.free(slot.device)
            cuda.host_free(slot.pinned)
