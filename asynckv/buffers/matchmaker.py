"""Which entry for which query: rules of selection over the prefix indexes.

Among entries the longest match wins, then the first in; among waiting queries
the one that has waited longest. Only equal fingerprints match.
"""

from __future__ import annotations

import collections

from asynckv.buffers.entries import EntryState, StoredEntry, Waiter
from asynckv.buffers.matching import PrefixIndex
from asynckv.buffers.waiters import WaitingQueries, matched_by_id
from asynckv.types import KVFingerprint

__all__ = ("Matchmaker", "find_by_id")

_NOT_SELECTABLE = (EntryState.DIRECT, EntryState.GONE)


class Matchmaker:
    """Entries that can be selected and queries that wait. Changes no entry's state."""

    def __init__(self) -> None:
        self.waiting_count = 0
        self._indexes: dict[KVFingerprint | None, PrefixIndex[StoredEntry]] = (
            collections.defaultdict(PrefixIndex)
        )
        self._lines: dict[KVFingerprint | None, WaitingQueries] = (
            collections.defaultdict(WaitingQueries)
        )

    def show(self, entry: StoredEntry) -> None:
        """Make the index agree with the entry: does it have a delivery left?"""
        if (
            len(entry.leases) >= entry.deliveries_left
            or entry.state in _NOT_SELECTABLE
            or entry.owner_gone  # it is its present consumers' alone
        ):
            self.hide(entry)
        elif entry.place is None:
            index = self._indexes[entry.draft.fingerprint]
            entry.place = index.add(entry.key(), entry.seq, entry)

    def hide(self, entry: StoredEntry) -> None:
        """Let no query find the entry. Shown again, it has its old place."""
        if entry.place is not None:
            self._indexes[entry.draft.fingerprint].remove(entry.place)
            entry.place = None

    def find(self, waiter: Waiter) -> tuple[StoredEntry, int] | None:
        """Return the entry that a query without an id may have now, and its match."""
        query = waiter.query
        index = self._indexes[waiter.fingerprint]
        if query.key is None:
            first = index.first(accept=waiter.may_have)
            return None if first is None else (first, 0)
        return index.best(
            query.key,
            min_tokens=query.min_matched_tokens,
            exact=query.match == "exact",
            accept=waiter.may_have,
        )

    def next_for(self, entry: StoredEntry) -> tuple[Waiter, int] | None:
        """Take the query out of the line that has waited longest for such an entry."""
        if not self.waiting_count or entry.place is None:
            return None
        line = self._lines[entry.draft.fingerprint]
        found = line.oldest(entry, lambda waiter: waiter.may_have(entry))
        if found is not None:
            self.dequeue(found[0])
        return found

    def peek(self, key: bytes, fingerprint: KVFingerprint | None) -> int:
        """Return the longest match among entries that could be selected now."""
        found = self._indexes[fingerprint].best(key)
        return 0 if found is None else found[1]

    def enqueue(self, waiter: Waiter) -> None:
        """Let the query wait, in the place its ``seq`` gives."""
        self.waiting_count += 1
        waiter.is_waiting = True
        self._lines[waiter.fingerprint].add(waiter)

    def dequeue(self, waiter: Waiter) -> None:
        """The query waits no longer."""
        waiter.is_waiting = False
        self.waiting_count -= 1
        self._lines[waiter.fingerprint].remove(waiter)

    def take_named(self, entry_id: str) -> list[Waiter]:
        """Take those out of their lines that wait for this very entry."""
        waiters: list[Waiter] = []
        for line in self._lines.values() if self.waiting_count else ():
            while (waiter := line.first_named(entry_id)) is not None:
                self.dequeue(waiter)
                waiters.append(waiter)
        return waiters

    def everyone(self) -> list[Waiter]:
        """Take every waiting query out of its line, who waits longest first."""
        waiters = [w for line in self._lines.values() for w in line.everyone()]
        for waiter in waiters:
            waiter.is_waiting = False
        self.waiting_count = 0
        return sorted(waiters, key=lambda waiter: waiter.seq)


def find_by_id(
    entries: dict[str, StoredEntry], waiter: Waiter
) -> tuple[StoredEntry, int] | None:
    """Return the entry of the query's id, if it may be had and its tokens agree."""
    entry = entries.get(waiter.query.entry_id or "")
    if (
        entry is None
        or entry.place is None
        or entry.draft.fingerprint != waiter.fingerprint
        or not waiter.may_have(entry)
    ):
        return None
    matched = matched_by_id(waiter, entry)
    return None if matched is None else (entry, matched)
