"""A buffer's arena, and the task that lets it grow while others wait for room."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable

import torch

from asynckv.links.offloading import in_thread
from asynckv.tensors.arena import Arena, HeapArena
from asynckv.tensors.slab_arena import SlabArena, SlabRegion
from asynckv.tensors.slabs import has_slabs
from asynckv.tensors.views import empty_tensor
from asynckv.types import TensorSpec

__all__ = ("Growth",)

logger = logging.getLogger(__name__)


class Growth:
    """Owns an ``arena`` of ``max_bytes``, and gets a slab whenever it asks for one.

    ``changed`` is called, on the loop, when there may be room that nobody left:
    a slab is there or cannot be had, or a view of released memory is gone.
    """

    def __init__(self, max_bytes: int, changed: Callable[[], None]) -> None:
        self.arena: Arena
        self._slabs: SlabArena | None = None
        if has_slabs():
            self.arena = self._slabs = SlabArena(
                max_bytes, wanted=self._grow_soon, freed=self._look_soon
            )
        else:
            self.arena = HeapArena(max_bytes)
        self._changed = changed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._growing: asyncio.Task[None] | None = None

    def empty(self, spec: TensorSpec) -> torch.Tensor:
        """Return a tensor in the arena, or where there is no room an ordinary one."""
        tensor = None if self._slabs is None else self._slabs.lend(spec)
        return empty_tensor(spec) if tensor is None else tensor

    def lent(self, tensors: Iterable[torch.Tensor]) -> tuple[SlabRegion | None, ...]:
        """Return the region of each tensor that :meth:`empty` has returned."""
        slabs = self._slabs
        if slabs is None or not slabs.has_lent:
            return ()
        return tuple(map(slabs.lent, tensors))

    def close(self) -> None:
        """Get no more slabs; one under way ends soon. Never waits."""
        self.arena.close()

    async def aclose(self) -> None:
        """Wait until no thread is at a slab. The memory of views stays theirs."""
        self.close()
        if self._growing is not None:
            await asyncio.wait({self._growing})

    def _grow_soon(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._growing is None:
            self._growing = self._loop.create_task(
                self._grow(), name="asynckv: a slab for a buffer"
            )

    async def _grow(self) -> None:
        slabs = self._slabs
        if slabs is None:
            return
        nbytes: int | None = None
        try:
            nbytes = await in_thread(slabs.make_slab)
        except RuntimeError:  # the process can have no thread
            logger.exception("no thread to get shared memory in")
        finally:
            self._growing = None
        slabs.add_slab(nbytes)
        self._changed()

    def _look_soon(self) -> None:
        loop = self._loop
        if loop is not None:  # else nobody has ever waited for room
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        if self._slabs is not None:
            self._slabs.collect()
        self._changed()
