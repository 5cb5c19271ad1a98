"""A buffer in memory of this process: the host's, or a GPU's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from asynckv.abc import KVCacheBuffer
from asynckv.affinity import LoopBound
from asynckv.devices.growth import Growth
from asynckv.devices.names import DeviceName, device_named
from asynckv.errors import BufferClosed
from asynckv.sharing.exporter import Exporter
from asynckv.types import parse_bytes
from asynckv.waits.waiting import FairQueue

__all__ = ("InMemoryBuffer",)


class InMemoryBuffer(LoopBound, KVCacheBuffer):
    """The parent of the buffers that hold bytes themselves, ``max_bytes`` at most.

    With a ``device`` these are in one allocation on that GPU, made when the buffer is
    entered. ``changed`` is called when memory may have become free.
    """

    def __init__(
        self,
        max_bytes: int | float | str,
        changed: Callable[[], None],
        device: DeviceName | None = None,
    ) -> None:
        self._device = device_named(device)
        self.is_closed = False
        """Whether every wait has ended for good."""
        bound = parse_bytes(max_bytes)
        if bound < 1:
            raise ValueError(
                "max_bytes is at least 1: a buffer of 0 bytes holds nothing"
            )
        self.growth = Growth(bound, changed, self._device)
        self._arena = self.growth.arena
        self.pool = self.growth.make_pool()
        self.exporter = Exporter(self._arena, changed, self.growth.drop_soon)

    @property
    def is_on_gpu(self) -> bool:
        """Is what it holds, and hands out, in memory of a GPU?"""
        return self._device is not None

    @property
    def device(self) -> str:
        """Where what it holds is: ``"cpu"``, or as torch calls the GPU."""
        return "cpu" if self._device is None else self._device.name

    async def open(self) -> None:
        """Get the memory of the GPU that it is to be on, if any. Again is nothing.

        Entering the buffer does that, or the first value that comes. A cancelled call
        leaves no trace.

        :raises BufferClosed: the buffer is closed
        :raises GPUUnavailable: CuPy, a driver or the GPU is missing
        :raises GPUFailed: the GPU has no memory left
        """
        self._check_loop()
        if self.is_closed:
            raise BufferClosed("the buffer is closed")
        await self.growth.open()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    def _memory_statistics(self) -> dict[str, int]:
        """Return what statistics of any such buffer say of its memory."""
        arena = self._arena
        return {
            "max_bytes": arena.max_bytes,
            "used_bytes": arena.used_bytes,
            "peak_bytes": arena.peak_bytes,
            "pinned_bytes": arena.pinned_bytes,
            "handed_out_bytes": arena.handed_out_bytes,
            "refused_slabs": arena.refused_slabs,
            "late_views": self.growth.late_views,
        }

    def _shown(self, what: str) -> str:
        used, bound = self._arena.used_bytes, self._arena.max_bytes
        where = f" on {self.device}" if self.is_on_gpu else ""
        return f"<{type(self).__name__}{where}, {what}, {used} of {bound} bytes>"

    def _close_memory(self) -> None:
        """Use it no more. What peers and views have of it stays theirs. Never waits."""
        self.is_closed = True
        self.pool.close()
        self.exporter.close()
        self.growth.close()

    async def _wait_closed(self, room: FairQueue[Any]) -> None:
        """Wait until no thread is at it, and for peers that have to close it first.

        Also for the last word to those who have waited for ``room``.
        """
        await room.aclose()
        await self.exporter.aclose()
        await self.growth.aclose()
