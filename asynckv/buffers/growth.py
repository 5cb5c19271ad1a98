"""A buffer's arena, and the thread that lets it grow while others wait for room."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import TypeAlias

from asynckv.tensors.arena import HeapArena
from asynckv.tensors.forking import watch_forks
from asynckv.tensors.lending import Lending
from asynckv.tensors.slab_arena import SlabArena
from asynckv.tensors.slabs import has_slabs

__all__ = ("Growth",)

logger = logging.getLogger(__name__)

_Slab: TypeAlias = asyncio.Future[int | None]


class Growth:
    """Owns an ``arena`` of ``max_bytes``, and gets a slab whenever it asks for one.

    ``changed`` is called, on the loop, when there may be room that nobody left:
    a slab is there or cannot be had, or a view of released memory is gone.
    """

    def __init__(self, max_bytes: int, changed: Callable[[], None]) -> None:
        self._slabs: SlabArena | None = None
        if has_slabs():
            self._slabs = SlabArena(
                max_bytes, wanted=self._grow_soon, freed=self._look_soon
            )
            watch_forks(self._slabs.pins)
        self.arena = self._slabs or HeapArena(max_bytes)
        self.lending = Lending(self.arena)
        self._changed = changed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._growing: _Slab | None = None
        self._is_looking = False

    def close(self) -> None:
        """Get no more slabs; one under way ends soon. Never waits."""
        self.arena.close()

    async def aclose(self) -> None:
        """Wait until no thread is at a slab. The memory of views stays theirs."""
        self.close()
        if self._growing is not None:
            await asyncio.wait({self._growing})

    def _grow_soon(self) -> None:
        if self._growing is not None:
            return
        loop = self._loop = asyncio.get_running_loop()
        self._growing = slab = loop.create_future()
        slab.add_done_callback(self._add_slab)
        # A thread of its own for each, as there are few: no daemon, because one
        # that is in the kernel while the interpreter ends takes the process down.
        thread = threading.Thread(
            target=self._make_slab, args=(loop, slab), name="asynckv-slab", daemon=False
        )
        try:
            thread.start()
        except RuntimeError:  # the process has as many threads as it may
            logger.exception("no thread to get shared memory in")
            slab.set_result(None)

    def _make_slab(self, loop: asyncio.AbstractEventLoop, slab: _Slab) -> None:
        nbytes: int | None = 0
        try:
            if self._slabs is not None:
                nbytes = self._slabs.pages.make_slab()
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(slab.set_result, nbytes)

    def _add_slab(self, slab: _Slab) -> None:
        self._growing = None
        if self._slabs is not None and not slab.cancelled():
            self._slabs.add_slab(slab.result())
            self._changed()

    def _look_soon(self) -> None:
        """Called by finalizers: in any thread, at any moment."""
        loop = self._loop
        if loop is None or self._is_looking:
            return  # nobody has ever waited for room, or it will be seen anyway
        self._is_looking = True
        try:
            loop.call_soon_threadsafe(self._look)
        except RuntimeError:  # the loop is closed
            self._is_looking = False

    def _look(self) -> None:
        self._is_looking = False  # what comes from here on is looked at again
        if self._slabs is not None:
            self._slabs.collect()
        self._changed()
