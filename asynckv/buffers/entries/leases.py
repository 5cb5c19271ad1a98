"""Who holds which entry: queries, the deliveries they get, and how those end.

Among entries the longest match wins, then the first in; among waiting queries the one
that has waited longest, and a query that lost its entry again is back in its old place.
Only equal fingerprints match. Rule of this file: every function is plain. Who waits is
called back as :class:`~asynckv.buffers.entries.entries.Holder`.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Final

from asynckv.buffers.entries.entries import (
    EntryState,
    Holder,
    Lease,
    StoredEntry,
    Waiter,
)
from asynckv.buffers.entries.prefix_index import PrefixIndex
from asynckv.buffers.entries.table import EntryTable
from asynckv.buffers.statistics import Counters
from asynckv.errors import EntryAborted, LeaseLost
from asynckv.transfers.tokens import TOKEN_NBYTES, Query
from asynckv.types import KVFingerprint

__all__ = (
    "Leases",
    "Matcher",
    "WaitingQueries",
    "entry_taken",
    "find_by_id",
    "matched_by_id",
)


_Accept = Callable[[Waiter], bool]


class WaitingQueries:
    """The waiting queries of one fingerprint."""

    def __init__(self) -> None:
        self._by_prefix: PrefixIndex[Waiter] = PrefixIndex()
        self._exact: PrefixIndex[Waiter] = PrefixIndex()
        self._any: PrefixIndex[Waiter] = PrefixIndex()
        self._by_id: dict[str, PrefixIndex[Waiter]] = {}

    def __len__(self) -> int:
        by_key = len(self._by_prefix) + len(self._exact)
        return by_key + len(self._any) + len(self._by_id)

    def add(self, waiter: Waiter) -> None:
        """Put ``waiter`` in line, in the place its ``seq`` gives."""
        query = waiter.query
        key = b"" if query.entry_id is not None else query.key or b""
        waiter.place = self._index_of(query).add(key, waiter.seq, waiter)

    def remove(self, waiter: Waiter) -> None:
        """Take ``waiter`` out of the line; nothing happens if it is not in it."""
        query, place = waiter.query, waiter.place
        waiter.place = None
        if place is not None:
            index = self._index_of(query)
            index.remove(place)
            if query.entry_id is not None and not len(index):
                del self._by_id[query.entry_id]

    def oldest(self, entry: StoredEntry, accept: _Accept) -> tuple[Waiter, int] | None:
        """Return who has waited longest of all that match, and the matched tokens."""

        def is_enough(waiter: Waiter, matched: int) -> bool:
            return matched >= waiter.query.min_matched_tokens and accept(waiter)

        key = entry.key() if len(self._by_prefix) or len(self._exact) else b""
        every = [
            self._by_prefix.oldest(key, accept=is_enough) if key else None,
            self._exact.best(key, exact=True, accept=accept) if key else None,
        ]
        if (any_waiter := self._any.first(accept=accept)) is not None:
            every.append((any_waiter, 0))
        if (named := self._by_id.get(entry.entry_id)) is not None:
            every.append(_first_named(named, entry, accept))
        candidates = [found for found in every if found is not None]
        return min(candidates, key=lambda found: found[0].seq, default=None)

    def first_named(self, entry_id: str) -> Waiter | None:
        """Return who has waited longest for this very entry, if anybody waits."""
        named = self._by_id.get(entry_id)
        return None if named is None else named.first()

    def everyone(self) -> Iterator[Waiter]:
        """Take all that wait out, in no order."""
        indexes = (self._by_prefix, self._exact, self._any, *self._by_id.values())
        for index in indexes:
            while (waiter := index.first()) is not None:
                self.remove(waiter)
                yield waiter

    def _index_of(self, query: Query) -> PrefixIndex[Waiter]:
        if query.entry_id is not None:
            return self._by_id.setdefault(query.entry_id, PrefixIndex())
        if query.key is None:
            return self._any
        # Apart: an insert asks nobody whose key is another one.
        return self._exact if query.match == "exact" else self._by_prefix


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
    if query.match == "exact":
        return matched if len(query.key) == len(key) else None
    return matched if matched >= query.min_matched_tokens else None


_NOT_SELECTABLE = (EntryState.DIRECT, EntryState.GONE)


class Matcher:
    """Entries that can be selected and queries that wait. Changes no entry's state."""

    def __init__(self) -> None:
        self.waiting_count = 0
        # Of the fingerprints that somebody has an entry of, or waits for one of.
        self._indexes: dict[KVFingerprint | None, PrefixIndex[StoredEntry]] = {}
        self._queues: dict[KVFingerprint | None, WaitingQueries] = {}

    def update(self, entry: StoredEntry) -> None:
        """Make the index agree with the entry: does it have a delivery left?"""
        if (
            len(entry.leases) >= entry.deliveries_left
            or entry.state in _NOT_SELECTABLE
            or entry.owner_gone  # it is its present consumers' alone
        ):
            self.remove(entry)
        elif entry.place is None:
            fingerprint = entry.draft.fingerprint
            if (index := self._indexes.get(fingerprint)) is None:
                index = self._indexes[fingerprint] = PrefixIndex()
            entry.place = index.add(entry.key(), entry.seq, entry)

    def remove(self, entry: StoredEntry) -> None:
        """Let no query find the entry. Added again, it has its old place."""
        if entry.place is not None:
            index = self._indexes[entry.draft.fingerprint]
            index.remove(entry.place)
            entry.place = None
            if not len(index):
                del self._indexes[entry.draft.fingerprint]

    def find(self, waiter: Waiter) -> tuple[StoredEntry, int] | None:
        """Return the entry that a query without an id may have now, and its match."""
        query = waiter.query
        if (index := self._indexes.get(waiter.fingerprint)) is None:
            return None
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
        if (queue := self._queues.get(entry.draft.fingerprint)) is None:
            return None
        found = queue.oldest(entry, lambda waiter: waiter.may_have(entry))
        if found is not None:
            self.dequeue(found[0])
        return found

    def peek(self, key: bytes, fingerprint: KVFingerprint | None) -> int:
        """Return the longest match among entries that could be selected now."""
        index = self._indexes.get(fingerprint)
        found = None if index is None else index.best(key)
        return 0 if found is None else found[1]

    def enqueue(self, waiter: Waiter) -> None:
        """Let the query wait, in the place its ``seq`` gives."""
        self.waiting_count += 1
        if (queue := self._queues.get(waiter.fingerprint)) is None:
            queue = self._queues[waiter.fingerprint] = WaitingQueries()
        queue.add(waiter)

    def dequeue(self, waiter: Waiter) -> None:
        """The query waits no longer."""
        self.waiting_count -= 1
        queue = self._queues[waiter.fingerprint]
        queue.remove(waiter)
        if not len(queue):
            del self._queues[waiter.fingerprint]

    def take_named(self, entry_id: str) -> list[Waiter]:
        """Take those out of their queues that wait for this very entry."""
        waiters: list[Waiter] = []
        for queue in list(self._queues.values()) if self.waiting_count else ():
            while (waiter := queue.first_named(entry_id)) is not None:
                self.dequeue(waiter)
                waiters.append(waiter)
        return waiters

    def everyone(self) -> list[Waiter]:
        """Take every waiting query out of its queue, who waits longest first."""
        waiters = [w for queue in self._queues.values() for w in queue.everyone()]
        self._queues.clear()
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


_TOKEN_NBYTES: Final = 16
_AT_A_TIME: Final = 64

logger = logging.getLogger(__name__)


class Leases:
    """The deliveries of a table's entries."""

    def __init__(
        self,
        table: EntryTable,
        matcher: Matcher,
        counters: Counters,
        *,
        max_deliver: int,
        max_hold_s: float | None,
    ) -> None:
        self._table = table
        self._matcher = matcher
        self._counters = counters
        self._max_deliver = max_deliver
        self._max_hold_s = max_hold_s
        self._seqs = itertools.count(1)
        self._tokens: list[bytes] = []
        self.is_closed = False
        self.leased_entries = 0
        """How many entries somebody holds."""

    @property
    def waiting_count(self) -> int:
        """How many queries wait for a match."""
        return self._matcher.waiting_count

    def select(
        self, query: Query, holder: Holder, fingerprint: KVFingerprint | None
    ) -> Waiter:
        """Lease the best entry to ``holder``, at once or as soon as one matches."""
        waiter = Waiter(query, holder, next(self._seqs), fingerprint)
        self._serve(waiter)
        return waiter

    def serve_again(self, waiter: Waiter) -> None:
        """Let a query whose delivery was taken back have one, in its old place."""
        if not waiter.is_forgotten and waiter.lease is None and not waiter.is_waiting:
            self._serve(waiter)

    def _serve(self, waiter: Waiter) -> None:
        if self.is_closed:
            waiter.holder.closed()
            return
        entry_id = waiter.query.entry_id
        if entry_id is not None:
            found = find_by_id(self._table.entries, waiter)
            if entry_id not in self._table.entries and self._table.was_taken(entry_id):
                waiter.holder.taken()
                return
        else:
            found = self._matcher.find(waiter)
        if found is not None:
            self._lease(found[0], waiter, found[1])
        else:
            self._counters.match_waits += 1
            self._matcher.enqueue(waiter)

    def forget(self, waiter: Waiter) -> None:
        """The query is cancelled; a delivery in its hand goes back."""
        waiter.is_forgotten = True
        if waiter.is_waiting:
            self._matcher.dequeue(waiter)
        if waiter.lease is not None:
            self.give_back(waiter.lease, reached=False)

    def peek(self, key: bytes, fingerprint: KVFingerprint | None) -> int:
        """Return the longest match among entries that could be selected now."""
        return self._matcher.peek(key, fingerprint)

    def offer(self, entry: StoredEntry) -> None:
        """Lease the entry to as many waiting queries as may have it."""
        self._matcher.update(entry)
        while (found := self._matcher.next_for(entry)) is not None:
            self._lease(entry, found[0], found[1])

    def acknowledge(self, lease: Lease) -> None:
        """The delivery counts. The entry leaves with its last one.

        :raises LeaseLost: the delivery was taken back meanwhile
        """
        entry = lease.entry
        if not lease.is_valid:
            raise LeaseLost(
                f"the lease on entry {entry.entry_id!r} ended before it was "
                "acknowledged; somebody else may have the entry"
            )
        self._end(lease, counts=True)
        entry.acknowledged_tokens.append(lease.token)
        entry.deliveries_left -= 1
        self._counters.acknowledged += 1
        if entry.deliveries_left == 0:
            self._table.remove(entry, "")
            for waiter in self._matcher.take_named(entry.entry_id):
                waiter.holder.taken()
        else:
            self._go_on(entry)

    def give_back(self, lease: Lease, *, reached: bool) -> None:
        """End a delivery without an acknowledgement; a stale one is ignored.

        ``reached``: the application had it and failed, which counts towards
        ``max_deliver``.
        """
        entry = lease.entry
        if not lease.is_valid:
            return
        self._end(lease)
        self._counters.given_back += 1
        entry.failures += reached
        if entry.failures < self._max_deliver:
            self._go_on(entry)
            return
        self._counters.undeliverable += 1
        logger.warning(
            "entry %r failed in %d consumers and is dropped",
            entry.entry_id,
            entry.failures,
        )
        self.void(entry, "max_deliver")

    def reach(self, lease: Lease) -> None:
        """The application has the delivery from now on: ``max_hold_s`` begins anew."""
        if lease.reached:
            return
        lease.reached = True
        if self._max_hold_s is not None and lease.is_valid:
            lease.hold(self._max_hold_s, self._lapse)

    def keep_for_ack(self, lease: Lease, late: Callable[[Lease], None]) -> None:
        """Its acknowledgement was answered: it is not given back for being held.

        The application may have it, though that is not known yet. If that stays so for
        ``max_hold_s`` more, ``late`` is called: it counts, as if the link were lost.
        """
        if self._max_hold_s is not None:
            lease.hold(self._max_hold_s, late)

    def keep_for_consumers(self, entry: StoredEntry) -> None:
        """Nobody else gets the entry any more."""
        entry.owner_gone = True
        self._matcher.update(entry)

    def void(self, entry: StoredEntry, reason: str) -> None:
        """The entry leaves, and whoever holds it learns that it will not come."""
        leases = sorted(entry.leases.values(), key=lambda lease: lease.waiter.seq)
        for lease in leases:
            self._end(lease)
        self._table.remove(entry, reason)
        for lease in leases:
            self._take_back(lease, reason)

    def closing(self) -> Iterator[None]:
        """Every query ends, and entries leave; yields now and then.

        What an application holds whole leaves when it is acknowledged or given
        back; no other delivery goes on, and no stream.
        """
        self.is_closed = True
        for waiter in self._matcher.everyone():
            waiter.holder.closed()
        before = self._counters.dropped
        for number, entry in enumerate(list(self._table.entries.values())):
            if number and not number % _AT_A_TIME:
                yield
            if entry.entry_id not in self._table.entries:
                continue  # it has left meanwhile
            leases = list(entry.leases.values())
            held = [x for x in leases if x.reached and not x.holder.streams]
            if not entry.complete or not held:
                self._counters.dropped += entry.state is EntryState.READY
                self.void(entry, "closed")
                continue
            self.keep_for_consumers(entry)
            for lease in leases:
                if lease not in held:
                    self._end(lease)
                    self._take_back(lease, "closed")
        if dropped := self._counters.dropped - before:
            logger.info("%d entries that nobody took leave with the buffer", dropped)

    def _lease(self, entry: StoredEntry, waiter: Waiter, matched_tokens: int) -> None:
        entry.attempts += 1
        if not self._tokens:
            self._tokens = _random_tokens()
        token = self._tokens.pop()
        lease = Lease(entry, waiter, matched_tokens, entry.attempts, token)
        self.leased_entries += not entry.leases
        entry.leases[token] = lease
        if entry.consumers is not None:
            entry.consumers.add(waiter.holder.consumer)
        waiter.lease = lease
        if self._max_hold_s is not None:
            lease.hold(self._max_hold_s, self._lapse)
        self._counters.delivered += 1
        if entry.state is EntryState.WAITING:
            lease.charge()
            self._table.memory.place_outside(entry)
            self._matcher.update(entry)
            self._table.changed()
        elif len(entry.leases) == entry.deliveries_left:
            self._matcher.remove(entry)
        waiter.holder.leased(lease)

    def _end(self, lease: Lease, *, counts: bool = False) -> None:
        """If it does not count its consumer may have the entry again."""
        lease.is_valid = False
        del lease.entry.leases[lease.token]
        self.leased_entries -= not lease.entry.leases
        lease.waiter.lease = None
        if lease.lapse is not None:
            lease.lapse.cancel()
        lease.uncharge()
        if not counts and lease.entry.consumers is not None:
            lease.entry.consumers.discard(lease.holder.consumer)

    def _go_on(self, entry: StoredEntry) -> None:
        """A delivery ended and others are left."""
        if entry.owner_gone:
            if not entry.leases:
                self._table.remove(entry, "closed" if self.is_closed else "producer")
        elif entry.state is EntryState.DIRECT:
            if entry.complete:
                self._table.wait_again(entry)
            self.offer(entry)
        elif not self._table.expire(entry):
            self.offer(entry)

    def _take_back(self, lease: Lease, reason: str) -> None:
        """The entry will not come: of an ended delivery."""
        self._counters.retracted += 1
        self._notify(lease, reason)

    def _notify(self, lease: Lease, reason: str) -> None:
        """Tell the holder of an ended delivery, unless an application has it whole."""
        if lease.holder.streams:
            lease.holder.aborted(lease, reason)
        elif not lease.reached:
            lease.holder.retracted(lease)
            self.serve_again(lease.waiter)

    def _lapse(self, lease: Lease) -> None:
        self._counters.lapsed += 1
        logger.warning(
            "a consumer held entry %r for %s s; it is given back",
            lease.entry.entry_id,
            self._max_hold_s,
        )
        self.give_back(lease, reached=lease.reached)
        self._notify(lease, "lapsed")


def entry_taken() -> EntryAborted:
    """Return what who asks for an entry by its id is told when it was taken."""
    return EntryAborted("others have taken that entry already", reason="taken")


def _random_tokens() -> list[bytes]:
    """Return tokens that nobody can guess, many from one call into the kernel."""
    pool = os.urandom(64 * _TOKEN_NBYTES)
    starts = range(0, len(pool), _TOKEN_NBYTES)
    return [pool[start : start + _TOKEN_NBYTES] for start in starts]
