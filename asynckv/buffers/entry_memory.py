"""Where the bytes of entries lie: in the arena, or outside, on their way to consumers.

Rule of this file: every function is plain, and none knows why an entry comes or goes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from asynckv.buffers.entries import EntryState, StoredEntry
from asynckv.buffers.statistics import Counters
from asynckv.errors import EntryTooLarge
from asynckv.tensors.arena import Arena, Region
from asynckv.tensors.lending import allocate_but

__all__ = ("LEAST_ACCOUNT_BYTES", "LEAST_ENTRIES", "EntryMemory")

LEAST_ACCOUNT_BYTES: Final = 64 * 2**20
"""What may be kept of entries beside their bytes, if a buffer is smaller."""

LEAST_ENTRIES: Final = 1024
_NBYTES_AN_ENTRY: Final = 2048
"""An entry costs 1.5 KB of Python: a buffer has one for each 2 KiB, or 1024."""


class EntryMemory:
    """What the entries of one buffer take of ``arena``, and beside it.

    ``outside_bytes`` have gone, or go, straight to consumers. ``has_more_outside`` is
    called when some of them are free again after somebody was refused some.
    """

    def __init__(
        self, arena: Arena, counters: Counters, has_more_outside: Callable[[], None]
    ) -> None:
        self.outside_bytes = 0
        self._arena = arena
        self._counters = counters
        self._has_more_outside = has_more_outside
        self._was_short_outside = False
        self._account_bytes = 0
        self._entries = 0

    def check_size(self, entry: StoredEntry) -> None:
        """Refuse what could not be in the arena if it were empty.

        :raises EntryTooLarge: it could never fit, or since memory was refused
        """
        if not self._arena.could_ever_fit(entry.sizes, entry.charges):
            is_short = self._arena.refused_slabs
            raise EntryTooLarge(
                nbytes=entry.nbytes,
                max_bytes=self._arena.max_bytes,
                hint="the system refused this buffer more memory" if is_short else None,
            )

    def is_growing_for(self, entry: StoredEntry) -> bool:
        """Whether it waits for nobody, but for memory that the system is asked for."""
        free_nbytes = self._arena.max_bytes - self._arena.used_bytes
        return self._arena.is_growing and entry.nbytes <= free_nbytes

    def place(self, entry: StoredEntry) -> bool:
        """Take memory for an entry that waits for room, if it fits.

        What is kept of it beside its bytes has to fit too.
        """
        if not self._may_be_booked(entry):
            return False
        regions = self._allocate(entry)
        if regions is None:
            return False
        self._book(entry)
        entry.place_regions(regions)
        entry.in_arena = True
        streaming = entry.draft.streaming
        entry.state = EntryState.STREAMING if streaming else EntryState.FILLING
        return True

    def may_place_outside(self, nbytes: int) -> bool:
        """Are so many bytes free outside, for a peer, which pays for them?

        There are as many as in the arena, whatever peers say they can receive.
        """
        if self.outside_bytes + nbytes <= self._arena.max_bytes:
            return True
        self._was_short_outside = True
        return False

    def place_outside(self, entry: StoredEntry) -> None:
        """Somebody selects it while it waits: its bytes go straight there."""
        regions = self._arena.allocate_outside(entry.sizes, entry.charges)
        entry.place_regions(regions)
        self.outside_bytes += entry.nbytes
        self._counters.direct += 1
        streaming = entry.draft.streaming
        entry.state = EntryState.STREAMING if streaming else EntryState.DIRECT

    def move_in(self, entry: StoredEntry) -> bool:
        """Charge the arena for a streaming entry that began outside, if it fits."""
        if not self._may_be_booked(entry):
            return False
        if not self._arena.adopt(entry.regions, len(entry.charges)):
            return False
        self._book(entry)
        entry.in_arena = True
        self.free_outside(entry)
        return True

    def free(self, entry: StoredEntry) -> None:
        """The entry leaves, wherever its bytes are; views keep those they show."""
        if entry.in_arena:
            self._arena.free(entry.regions)
            self._account_bytes -= entry.account_nbytes
            self._entries -= 1
        elif entry.regions:
            self.free_outside(entry)
        entry.drop_regions()

    def free_outside(self, entry: StoredEntry) -> None:
        """Its bytes are not outside any more."""
        self.outside_bytes -= entry.nbytes
        if self._was_short_outside:
            self._was_short_outside = False
            self._has_more_outside()

    def _may_be_booked(self, entry: StoredEntry) -> bool:
        """Entries without a byte cost memory too: there is no end of them else."""
        bound = max(self._arena.max_bytes, LEAST_ACCOUNT_BYTES)
        account_bytes = self._account_bytes
        max_bytes = self._arena.max_bytes
        if self._entries >= max(LEAST_ENTRIES, max_bytes // _NBYTES_AN_ENTRY):
            return False
        return not account_bytes or account_bytes + entry.account_nbytes <= bound

    def _book(self, entry: StoredEntry) -> None:
        self._account_bytes += entry.account_nbytes
        self._entries += 1

    def _allocate(self, entry: StoredEntry) -> list[Region] | None:
        lent = entry.draft.lent
        if not lent:
            return self._arena.allocate(entry.sizes, entry.charges)
        return allocate_but(lent, self._arena, entry.sizes, entry.charges)
