"""Which entries there are, where their bytes lie, and how those that left did.

Rule of this file: every function is plain, and none knows of queries or leases.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Final

from asynckv.buffers.drafts import Draft
from asynckv.buffers.entries import EntryState, StoredEntry
from asynckv.buffers.expiry import ExpiryClock
from asynckv.buffers.statistics import Counters
from asynckv.buffers.tombstones import Tombstone, Tombstones
from asynckv.errors import EntryAborted, EntryConflict, EntryTooLarge
from asynckv.tensors.arena import Arena, Region
from asynckv.tensors.lending import allocate_but

__all__ = ("LEAST_ACCOUNT_BYTES", "EntryBook")

LEAST_ACCOUNT_BYTES: Final = 64 * 2**20
"""What may be kept of entries beside their bytes, if a buffer is smaller."""

logger = logging.getLogger(__name__)


class EntryBook:
    """The entries of a buffer by their ids, and what is remembered of others.

    ``hide`` is called with an entry that leaves and could still be selected,
    ``changed`` whenever room or a state may have changed, ``has_more_outside``
    when bytes outside are free again after somebody was refused some.
    """

    def __init__(
        self,
        arena: Arena,
        counters: Counters,
        *,
        hide: Callable[[StoredEntry], None],
        changed: Callable[[], None],
        has_more_outside: Callable[[], None],
    ) -> None:
        self.entries: dict[str, StoredEntry] = {}
        self.outside_bytes = 0
        self.changed = changed
        self._has_more_outside = has_more_outside
        self._was_short_outside = False
        self._account_bytes = 0
        self._arena = arena
        self._counters = counters
        self._hide = hide
        self._seqs = itertools.count(1)
        self.tombstones = Tombstones()
        self._expiry = ExpiryClock(self._expire_id, self.entries)

    def admit(self, draft: Draft) -> StoredEntry:
        """Begin an entry.

        :raises EntryTooLarge: it could never fit
        :raises EntryConflict: the id is known, or an insert under it is under way
        """
        known = self.known_digest(draft.entry_id)
        if known is not None or draft.entry_id in self.entries:
            raise EntryConflict(
                f"entry {draft.entry_id!r} is known with other contents, or an "
                "insert under that id is under way",
                hint="use a new entry_id for new contents",
            )
        entry = StoredEntry(draft, next(self._seqs))
        self.check_size(entry)
        self.entries[entry.entry_id] = entry
        return entry

    def check_size(self, entry: StoredEntry) -> None:
        """Refuse what could not be in the arena if it were empty.

        :raises EntryTooLarge: it could never fit, or since memory was refused
        """
        if not self.could_ever_fit(entry):
            raise EntryTooLarge(nbytes=entry.nbytes, max_bytes=self._arena.max_bytes)

    def could_ever_fit(self, entry: StoredEntry) -> bool:
        """Would it fit if the arena were empty?"""
        return self._arena.could_ever_fit(entry.sizes, entry.charges)

    def resume(self, entry: StoredEntry, digest: bytes) -> None:
        """Let a new entry go on where an insert of the same contents broke off."""
        stone = self.tombstones.find(entry.entry_id, _now())
        if stone is None or not stone.attempts or stone.digest != digest:
            return
        entry.attempts, entry.failures = stone.attempts, stone.failures
        entry.acknowledged_tokens.extend(stone.tokens)
        entry.deliveries_left = max(1, entry.deliveries_left - len(stone.tokens))
        if entry.consumers is not None:
            entry.consumers.update(stone.consumers)

    def is_known(self, entry_id: str) -> bool:
        """Is an entry of that id here, or was one until it left lately?"""
        if entry_id in self.entries:
            return True
        return self.tombstones.find(entry_id, _now()) is not None

    def known_digest(self, entry_id: str) -> bytes | None:
        """Return the digest of a committed or acknowledged entry of that id."""
        entry = self.entries.get(entry_id)
        if entry is not None:
            return entry.digest() if entry.complete else None
        stone = self.tombstones.find(entry_id, _now())
        return stone.digest if stone is not None and not stone.reason else None

    def is_undecided(self, entry_id: str) -> bool:
        """Has that entry all its bytes, but only in a consumer's hands?

        Acknowledged it was inserted; given back it was not, or not yet.
        """
        entry = self.entries.get(entry_id)
        return entry is not None and entry.complete and not entry.in_arena

    def was_acknowledged(self, entry_id: str, token: bytes) -> bool:
        """Did that delivery count? Asked by a consumer whose link was cut."""
        entry = self.entries.get(entry_id)
        if entry is not None:
            return token in entry.acknowledged_tokens
        stone = self.tombstones.find(entry_id, _now())
        return stone is not None and token in stone.tokens

    def when_gone(self, entry_id: str) -> asyncio.Future[None]:
        """Return a future of the entry's end.

        :raises KeyError: the id is unknown
        :raises EntryAborted: it left already, by something else than an
            acknowledgement
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = self.entries.get(entry_id)
        if entry is not None:
            entry.gone.add(future)
            future.add_done_callback(entry.gone.discard)
            return future
        stone = self.tombstones.find(entry_id, _now())
        if stone is None:
            raise KeyError(f"no entry {entry_id!r} is here, or was in the last minutes")
        if stone.reason:
            raise EntryAborted(reason=stone.reason)
        future.set_result(None)
        return future

    def place(self, entry: StoredEntry) -> bool:
        """Take memory for an entry that waits for room, if it fits.

        What is kept of it beside its bytes has to fit too.
        """
        if not self._may_be_booked(entry):
            return False
        regions = self._allocate(entry)
        if regions is None:
            return False
        self._account_bytes += entry.account_nbytes
        entry.place_regions(regions)
        entry.in_arena = True
        streaming = entry.draft.streaming
        entry.state = EntryState.STREAMING if streaming else EntryState.FILLING
        return True

    def _allocate(self, entry: StoredEntry) -> list[Region] | None:
        lent = entry.draft.lent
        if not lent:
            return self._arena.allocate(entry.sizes, entry.charges)
        return allocate_but(lent, self._arena, entry.sizes, entry.charges)

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
        self._account_bytes += entry.account_nbytes
        entry.in_arena = True
        self._free_outside(entry)
        return True

    def wait_again(self, entry: StoredEntry) -> None:
        """A direct delivery ended but the entry stays: back to its old place."""
        self._free_outside(entry)
        entry.delivered_digest = entry.digest()
        entry.drop_regions()
        entry.begin_again()
        entry.state = EntryState.WAITING
        self.changed()

    def make_ready(self, entry: StoredEntry) -> None:
        """It is in, and its time begins to run."""
        entry.state = EntryState.READY
        self._counters.inserted += 1
        if entry.draft.ttl_s is not None:
            entry.expires_at = _now() + entry.draft.ttl_s
            self._expiry.add(entry.expires_at, entry.entry_id)

    def expire(self, entry: StoredEntry) -> bool:
        """Let a READY entry that nobody holds leave if its time is over."""
        over = entry.expires_at is not None and entry.expires_at <= _now()
        if entry.state is not EntryState.READY or entry.leases or not over:
            return False
        self._counters.expired += 1
        logger.info("entry %r was not taken in time and leaves", entry.entry_id)
        self.leave(entry, "ttl")
        return True

    def leave(self, entry: StoredEntry, reason: str) -> None:
        """The entry is gone; nobody holds it. An acknowledgement has no reason."""
        if not reason and entry.state is not EntryState.READY:
            self._counters.inserted += 1  # straight to its consumers
        entry.state = EntryState.GONE
        entry.left_by = reason
        if entry.place is not None:
            self._hide(entry)
        if entry.in_arena:
            self._arena.free(entry.regions)
            self._account_bytes -= entry.account_nbytes
        elif entry.regions:
            self._free_outside(entry)
        entry.drop_regions()
        del self.entries[entry.entry_id]
        was_seen = entry.complete or entry.draft.streaming or entry.delivered_digest
        if was_seen or reason != "producer":
            self._bury(entry)  # others leave without a trace
        if entry.gone:
            _tell_gone(entry)
        self.changed()

    def close(self) -> None:
        """Nothing more expires."""
        self._expiry.stop()

    def _may_be_booked(self, entry: StoredEntry) -> bool:
        """Entries without a byte cost memory too: there is no end of them else."""
        bound = max(self._arena.max_bytes, LEAST_ACCOUNT_BYTES)
        account_bytes = self._account_bytes
        return not account_bytes or account_bytes + entry.account_nbytes <= bound

    def _free_outside(self, entry: StoredEntry) -> None:
        self.outside_bytes -= entry.nbytes
        if self._was_short_outside:
            self._was_short_outside = False
            self._has_more_outside()

    def _bury(self, entry: StoredEntry) -> None:
        # Also what was in may be sent again: who inserted it may not know of it.
        goes_on = not entry.draft.streaming
        stone = Tombstone(
            entry.left_by,
            entry.digest() if entry.complete else entry.delivered_digest,
            tuple(entry.acknowledged_tokens),
            _now(),
            entry.attempts if goes_on else 0,
            entry.failures if entry.left_by != "max_deliver" else 0,
            frozenset(entry.consumers or ()),
        )
        self.tombstones.bury(entry.entry_id, stone)

    def _expire_id(self, entry_id: str) -> None:
        entry = self.entries.get(entry_id)
        if entry is not None:
            self.expire(entry)


def _tell_gone(entry: StoredEntry) -> None:
    for future in list(entry.gone):
        if future.done():
            continue
        if entry.left_by:
            future.set_exception(EntryAborted(reason=entry.left_by))
            future.exception()  # who waited may have been cancelled meanwhile
        else:
            future.set_result(None)


def _now() -> float:
    return asyncio.get_running_loop().time()
