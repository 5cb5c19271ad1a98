"""Finds a slot for a value: a free one, one more file, or one of the least wanted.

A slot has one size for as long as its file is there. Files of a size that nobody wants
any more make room for those of another.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any, Final

from asynckv.abc.tiers import TierResult
from asynckv.stores.disk.calls import PAGE_NBYTES
from asynckv.stores.disk.directory import SlotDirectory
from asynckv.stores.disk.index import SlotIndex
from asynckv.stores.disk.segments import Segment
from asynckv.stores.disk.slot_io import Bounce
from asynckv.stores.disk.slots import body_pages_of, largest_body_pages
from asynckv.stores.threads import WRITE, Stopped, TierThreads, ask

__all__ = ("Room",)

logger = logging.getLogger(__name__)

_FILES: Final = 64
_LARGE_FILE_NBYTES: Final = 32 * 2**20
_LEAST_FILES: Final = 8
_LEAST_VALUES: Final = 4
"""So many of the largest values have room at least."""


class Room:
    """Slots in files of at most ``max_bytes`` together.

    ``is_known``: were all slots looked at? Before that nothing has to leave. A full
    disk is asked for more no sooner than after ``full_retry_s``.
    """

    def __init__(
        self,
        index: SlotIndex,
        directory: SlotDirectory,
        threads: TierThreads[Bounce],
        max_bytes: int,
        full_retry_s: float,
    ) -> None:
        self.is_known = False
        self.max_body_nbytes = PAGE_NBYTES * largest_body_pages(
            max_bytes // _LEAST_VALUES
        )
        self._index = index
        self._directory = directory
        self._threads = threads
        # The lock has a page, too.
        self._max_bytes = self._limit = max_bytes - PAGE_NBYTES
        self._file_nbytes = max(
            max_bytes // _FILES, min(_LARGE_FILE_NBYTES, max_bytes // _LEAST_FILES)
        )
        self._full_retry_s = full_retry_s
        self._full_until_s = 0.0
        self._is_closed = self._has_said = False
        self._changing: asyncio.Future[None] | None = None
        """There is one more file soon, or one less."""

    def close(self) -> None:
        """Nobody gets a slot any more."""
        self._is_closed = True

    def try_again(self) -> None:
        """The disk may have room again."""
        self._limit = self._max_bytes
        self._has_said = False

    async def settled(self) -> None:
        """Wait until files that are on their way out are gone."""
        while self._changing is not None:
            await asyncio.shield(self._changing)

    async def take(self, nbytes: int) -> int | TierResult:
        """Take a slot for a value of ``nbytes``; say why there is none."""
        if nbytes > self.max_body_nbytes:
            return TierResult.REFUSED
        pages = 1 + body_pages_of(nbytes)
        # Each time it may get a little more, in a file of its own.
        has_few = len(self._index.segments) < 2 * _FILES
        if has_few and time.monotonic() >= self._full_until_s:
            self._limit = self._max_bytes
        while not self._is_closed:
            if (slot := self._index.take(pages)) is not None:
                return slot
            if self._changing is not None:
                await self.settled()
            elif self._index.file_nbytes + pages * PAGE_NBYTES <= self._limit:
                await self._change(self._add_file(pages))
            elif not self.is_known:
                return TierResult.REFUSED
            elif colder := self._index.coldest_segment(pages, is_needed=False):
                await self._change(self._remove_file(colder))
            elif (slot := self._index.evict(pages)) is not None:
                return slot
            elif colder := self._index.coldest_segment(pages, is_needed=True):
                await self._change(self._remove_file(colder))
            else:
                return TierResult.REFUSED
        return TierResult.FAILED

    async def _change(self, change: Coroutine[Any, Any, None]) -> None:
        self._changing = asyncio.get_running_loop().create_future()
        try:
            await change
        except Stopped:
            self._is_closed = True
        finally:
            changing, self._changing = self._changing, None
            changing.set_result(None)

    async def _add_file(self, pages: int) -> None:
        index, slot_nbytes = self._index, pages * PAGE_NBYTES
        left = self._limit - index.file_nbytes
        wanted = max(min(self._file_nbytes, left) // slot_nbytes, 1)

        def add(bounce: Bounce) -> Segment:
            file = self._directory.create(pages, wanted)
            try:
                return Segment(file.number, pages, file.count)
            except MemoryError:
                self._directory.remove(file.number)
                raise

        try:
            segment = await ask(self._threads, WRITE, add)
        except (OSError, MemoryError) as exc:
            self._stop_growing(exc)
            return
        index.add_segment(segment, is_free=True)
        if segment.count < wanted:
            self._stop_growing("the disk is full")

    async def _remove_file(self, segment: Segment) -> None:
        for _ in self._index.forget_segment(segment):
            await asyncio.sleep(0)
        number = segment.number
        try:
            await ask(
                self._threads, WRITE, lambda bounce: self._directory.remove(number)
            )
        except OSError as exc:
            self._index.unread += segment.count
            self._stop_growing(exc)
        else:
            self._index.file_nbytes -= segment.nbytes

    def _stop_growing(self, why: object) -> None:
        self._limit = self._index.file_nbytes
        self._full_until_s = time.monotonic() + self._full_retry_s
        if not self._has_said:
            self._has_said = True
            logger.warning(
                "%s stays at %d bytes: %s", self._directory.path, self._limit, why
            )
