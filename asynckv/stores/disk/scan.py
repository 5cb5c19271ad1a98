"""Finds out what is on the disk: reads the first page of every slot, once.

Chunk by chunk in the tier's threads, behind everything else that they have to do; the
loop takes in what each chunk has found.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

from asynckv.stores.disk.calls import PAGE_NBYTES
from asynckv.stores.disk.directory import OpenSlotFile
from asynckv.stores.disk.slot_io import Bounce
from asynckv.stores.disk.slots import FoundSlots, find_slot
from asynckv.stores.threads import SCAN, Stopped, TierThreads

__all__ = ("Found", "Scan")

logger = logging.getLogger(__name__)

_CHUNK_SLOTS: Final = 256
_CHUNKS_A_THREAD: Final = 4
"""So many wait, that no thread waits for the loop."""

Found: TypeAlias = Callable[[OpenSlotFile, range, FoundSlots, list[int]], None]
"""Told of a chunk of slots: the values in it, and which could not be read."""


class Scan:
    """Looks at all slots of ``files``; calls ``ended`` on the loop when it has.

    ``ended`` is not called where it was stopped.
    """

    def __init__(
        self,
        files: Sequence[OpenSlotFile],
        threads: TierThreads[Bounce],
        *,
        found: Found,
        ended: Callable[[], None],
    ) -> None:
        self._chunks = _chunks_of(files)
        self._threads = threads
        self._found = found
        self._ended = ended
        self._running = 0
        self._has_unread = False

    def start(self, threads: int) -> None:
        """Begin. Never waits."""
        for _ in range(threads * _CHUNKS_A_THREAD):
            self._next()
        self._end_if_over()

    def _next(self) -> None:
        chunk = next(self._chunks, None)
        if chunk is None:
            return
        file, slots = chunk
        self._running += 1

        def done(
            result: tuple[FoundSlots, list[int]] | None, error: Exception | None
        ) -> None:
            self._running -= 1
            if isinstance(error, Stopped):
                return
            if error is not None or result is None:
                raise RuntimeError("a scan of slots ended by itself") from error
            found, unread = result
            if unread and not self._has_unread:
                self._has_unread = True
                logger.warning(
                    "slots of %s cannot be read: they are left out", file.path
                )
            self._found(file, slots, found, unread)
            self._next()
            self._end_if_over()

        self._threads.submit(SCAN, lambda bounce: self._read(file, slots, bounce), done)

    def _end_if_over(self) -> None:
        if not self._running:
            self._ended()

    def _read(
        self, file: OpenSlotFile, slots: range, bounce: Bounce
    ) -> tuple[FoundSlots, list[int]]:
        # Slot by slot, as whoever looks at many at once keeps the others from reading.
        preadv, fd, page, number = file.calls.preadv, file.fd, bounce.head, file.number
        offset = slots.start * file.slot_nbytes
        found, unread = [], []
        for slot in slots:
            try:
                is_whole = preadv(fd, [page], offset) == PAGE_NBYTES
            except OSError:
                is_whole = False
            if not is_whole:
                unread.append(slot)
            elif row := find_slot(page, number, slot):
                found.append(row)
            offset += file.slot_nbytes
        self._threads.check()
        return FoundSlots.of(found), unread


def _chunks_of(files: Sequence[OpenSlotFile]) -> Iterator[tuple[OpenSlotFile, range]]:
    for file in files:
        for start in range(0, file.count, _CHUNK_SLOTS):
            yield file, range(start, min(start + _CHUNK_SLOTS, file.count))
