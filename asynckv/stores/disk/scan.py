"""Finds out what is on the disk: reads the first page of every slot, once.

Chunk by chunk in the tier's threads, behind everything else that they have to do; the
loop takes in what each chunk has found.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

from asynckv.stores.disk.calls import PAGE_NBYTES
from asynckv.stores.disk.directory import OpenSlotFile
from asynckv.stores.disk.slot_io import Bounce
from asynckv.stores.disk.slots import FoundSlots, find_slot
from asynckv.stores.threads import SCAN, TierThreads, ask

__all__ = ("Found", "scan")

logger = logging.getLogger(__name__)

_CHUNK_SLOTS: Final = 256
_CHUNKS_A_THREAD: Final = 4
"""So many wait, that no thread waits for the loop."""

Found: TypeAlias = Callable[[OpenSlotFile, range, FoundSlots, list[int]], None]
"""Told of a chunk of slots: the values in it, and which could not be read."""


async def scan(
    files: Sequence[OpenSlotFile],
    threads: TierThreads[Bounce],
    count: int,
    found: Found,
) -> None:
    """Look at all slots of ``files``, by ``count`` threads, and tell what there is.

    :raises Stopped: the tier was closed before the end
    """
    chunks = _chunks_of(files)
    has_unread = False

    async def look() -> None:
        nonlocal has_unread
        for file, slots in chunks:
            read = functools.partial(_read, threads, file, slots)
            values, unread = await ask(threads, SCAN, read)
            if unread and not has_unread:
                has_unread = True
                logger.warning(
                    "slots of %s cannot be read: they are left out", file.path
                )
            found(file, slots, values, unread)

    await asyncio.gather(*[look() for _ in range(count * _CHUNKS_A_THREAD)])


def _read(
    threads: TierThreads[Bounce], file: OpenSlotFile, slots: range, bounce: Bounce
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
    threads.check()
    return FoundSlots.of(found), unread


def _chunks_of(files: Sequence[OpenSlotFile]) -> Iterator[tuple[OpenSlotFile, range]]:
    for file in files:
        for start in range(0, file.count, _CHUNK_SLOTS):
            yield file, range(start, min(start + _CHUNK_SLOTS, file.count))
