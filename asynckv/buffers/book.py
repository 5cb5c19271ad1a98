"""Which entries there are, and how those that left did.

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
from asynckv.buffers.entry_memory import EntryMemory
from asynckv.buffers.expiry import ExpiryClock
from asynckv.buffers.statistics import Counters
from asynckv.buffers.tombstones import Tombstone, Tombstones
from asynckv.errors import EntryAborted, EntryConflict

__all__ = ("EntryBook",)

logger = logging.getLogger(__name__)

_NOBODY: Final[frozenset[str]] = frozenset()


class EntryBook:
    """The entries of a buffer by their ids, and what is remembered of others.

    ``memory`` is where their bytes lie. ``hide`` is called with an entry that leaves
    and could still be selected, ``changed`` whenever room or a state may have changed.
    """

    def __init__(
        self,
        memory: EntryMemory,
        counters: Counters,
        *,
        hide: Callable[[StoredEntry], None],
        changed: Callable[[], None],
    ) -> None:
        self.entries: dict[str, StoredEntry] = {}
        self.memory = memory
        self.changed = changed
        self._counters = counters
        self._hide = hide
        self._seqs = itertools.count(1)
        self.tombstones = Tombstones()
        self._expiry = ExpiryClock(self._expire_id, self.entries)

    def admit(self, draft: Draft) -> StoredEntry:
        """Begin an entry.

        :raises EntryTooLarge: it could never fit
        :raises EntryConflict: the id is known
        """
        known = self.known_digest(draft.entry_id)
        if known is not None or draft.entry_id in self.entries:
            other = "" if draft.streaming else ", with other contents"
            raise EntryConflict(
                f"entry {draft.entry_id!r} is known already{other}",
                hint="use a new entry_id for new contents",
            )
        entry = StoredEntry(draft, next(self._seqs))
        self.memory.check_size(entry)
        self.entries[entry.entry_id] = entry
        return entry

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

    def was_taken(self, entry_id: str) -> bool:
        """Has that entry left by its last acknowledgement, as far as is known?"""
        stone = self.tombstones.find(entry_id, _now())
        return stone is not None and not stone.reason

    def is_undecided(self, entry_id: str) -> bool:
        """Is an insert under that id under way, or ending?

        Also if all its bytes are in, but only in a consumer's hands: acknowledged it
        was inserted; given back it was not, or not yet.
        """
        entry = self.entries.get(entry_id)
        return entry is not None and not (entry.complete and entry.in_arena)

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

    def wait_again(self, entry: StoredEntry) -> None:
        """A direct delivery ended but the entry stays: back to its old place."""
        self.memory.free_outside(entry)
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
        self.memory.free(entry)
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
            frozenset(entry.consumers) if entry.consumers else _NOBODY,
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
