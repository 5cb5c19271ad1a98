"""Queries that wait for an entry, and who of them is served first.

Among all that match a new entry the one that has waited longest is served; a
query that lost its entry again is back in its old place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from asynckv.buffers.entries import StoredEntry, Waiter
from asynckv.buffers.matching import PrefixIndex
from asynckv.buffers.queries import TOKEN_NBYTES

__all__ = ("WaitingQueries", "matched_by_id")

_Accept = Callable[[Waiter], bool]


class WaitingQueries:
    """The waiting queries of one fingerprint."""

    def __init__(self) -> None:
        self._by_key: PrefixIndex[Waiter] = PrefixIndex()
        self._any: PrefixIndex[Waiter] = PrefixIndex()
        self._by_id: dict[str, PrefixIndex[Waiter]] = {}

    def add(self, waiter: Waiter) -> None:
        """Put ``waiter`` in line, in the place its ``seq`` gives."""
        query = waiter.query
        if query.entry_id is not None:
            named = self._by_id.setdefault(query.entry_id, PrefixIndex())
            waiter.place = named.add(b"", waiter.seq, waiter)
        elif query.key is None:
            waiter.place = self._any.add(b"", waiter.seq, waiter)
        else:
            waiter.place = self._by_key.add(query.key, waiter.seq, waiter)

    def remove(self, waiter: Waiter) -> None:
        """Take ``waiter`` out of the line; nothing happens if it is not in it."""
        query, place = waiter.query, waiter.place
        waiter.place = None
        if place is None:
            return
        if query.entry_id is None:
            (self._any if query.key is None else self._by_key).remove(place)
            return
        named = self._by_id[query.entry_id]
        named.remove(place)
        if not len(named):
            del self._by_id[query.entry_id]

    def oldest(self, entry: StoredEntry, accept: _Accept) -> tuple[Waiter, int] | None:
        """Return who has waited longest of all that match, and the matched tokens."""
        candidates: list[tuple[Waiter, int]] = []
        key = entry.key() if len(self._by_key) else b""
        if key:
            found = self._by_key.oldest(
                key,
                accept=lambda waiter, matched: (
                    _is_enough(waiter, matched, len(key)) and accept(waiter)
                ),
            )
            if found is not None:
                candidates.append(found)
        if (any_waiter := self._any.first(accept=accept)) is not None:
            candidates.append((any_waiter, 0))
        named = self._by_id.get(entry.entry_id)
        if named and (by_id := _first_named(named, entry, accept)) is not None:
            candidates.append(by_id)
        return min(candidates, key=lambda found: found[0].seq, default=None)

    def first_named(self, entry_id: str) -> Waiter | None:
        """Return who has waited longest for this very entry, if anybody waits."""
        named = self._by_id.get(entry_id)
        return None if named is None else named.first()

    def everyone(self) -> Iterator[Waiter]:
        """Take all that wait out, in no order."""
        for line in [self._by_key, self._any, *self._by_id.values()]:
            while (waiter := line.first()) is not None:
                self.remove(waiter)
                yield waiter


def _first_named(
    named: PrefixIndex[Waiter], entry: StoredEntry, accept: _Accept
) -> tuple[Waiter, int] | None:
    """Return who has waited longest for this very entry, and the matched tokens."""
    waiter = named.first(
        accept=lambda w: matched_by_id(w, entry) is not None and accept(w)
    )
    return None if waiter is None else (waiter, matched_by_id(waiter, entry) or 0)


def matched_by_id(waiter: Waiter, entry: StoredEntry) -> int | None:
    """Return the matched tokens if the entry also satisfies the query's tokens."""
    query = waiter.query
    if query.key is None:
        return 0
    key = entry.key()
    shorter = min(len(key), len(query.key))
    if not shorter or key[:shorter] != query.key[:shorter]:
        return None
    matched = shorter // TOKEN_NBYTES
    return matched if _is_enough(waiter, matched, len(key)) else None


def _is_enough(waiter: Waiter, matched: int, key_nbytes: int) -> bool:
    query = waiter.query
    if query.match == "exact":
        return query.key is not None and len(query.key) == key_nbytes
    return matched >= query.min_matched_tokens
