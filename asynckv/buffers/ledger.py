"""The state of a lookup buffer: entries, waiting queries, leases.

Rule of this file: every function is plain. Nothing here waits, copies payload
or talks to a peer; those who wait call in, and are called back as
:class:`~asynckv.buffers.entries.Holder`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from asynckv.buffers.entries import (
    Draft,
    EntryState,
    Holder,
    Lease,
    StoredEntry,
    Waiter,
)
from asynckv.buffers.expiry import ExpiryClock
from asynckv.buffers.matchmaker import Matchmaker, find_by_id
from asynckv.buffers.queries import Query
from asynckv.buffers.statistics import Counters
from asynckv.buffers.tombstones import Tombstone, Tombstones
from asynckv.errors import EntryAborted, EntryConflict, EntryTooLarge, LeaseLost
from asynckv.tensors.arena import Arena
from asynckv.types import KVFingerprint

__all__ = ("Ledger",)

logger = logging.getLogger(__name__)


class Ledger:
    """Who holds what. ``changed`` is called whenever room or a state may have."""

    def __init__(
        self,
        arena: Arena,
        *,
        max_deliver: int,
        max_hold_s: float | None,
        changed: Callable[[], None],
    ) -> None:
        self.arena = arena
        self.counters = Counters()
        self.entries: dict[str, StoredEntry] = {}
        self.outside_bytes = 0
        self.tombstones = Tombstones()
        self._max_deliver = max_deliver
        self._max_hold_s = max_hold_s
        self._changed = changed
        self._next_seq = 0
        self._is_closed = False
        self._matchmaker = Matchmaker()
        self._expiry = ExpiryClock(self._expire_id, self.entries)

    @property
    def waiting_count(self) -> int:
        """How many queries wait for a match."""
        return self._matchmaker.waiting_count

    def admit(self, draft: Draft, digest: bytes | None) -> StoredEntry | None:
        """Begin an entry; ``None`` if the same one was inserted before.

        ``digest`` is the entry's if it is known already.

        :raises EntryTooLarge: it could never fit
        :raises EntryConflict: the id is known with other contents, or an insert
            under it is under way
        """
        known = self.known_digest(draft.entry_id)
        if known is not None and known == digest:
            return None
        if known is not None or draft.entry_id in self.entries:
            raise EntryConflict(
                f"entry {draft.entry_id!r} is known with other contents, or an "
                "insert under that id is under way",
                hint="use a new entry_id for new contents",
            )
        if not self.arena.could_ever_fit(draft.sizes):
            raise EntryTooLarge(nbytes=sum(draft.sizes), max_bytes=self.arena.max_bytes)
        self._next_seq += 1
        entry = StoredEntry(draft, self._next_seq)
        self.entries[entry.entry_id] = entry
        return entry

    def known_digest(self, entry_id: str) -> bytes | None:
        """Return the digest of a committed or acknowledged entry of that id."""
        entry = self.entries.get(entry_id)
        if entry is not None:
            return entry.digest() if entry.complete else None
        stone = self.tombstones.find(entry_id, self._now())
        return stone.digest if stone is not None and not stone.reason else None

    def is_undecided(self, entry_id: str) -> bool:
        """Has that entry all its bytes, but only in a consumer's hands?

        Acknowledged it was inserted; given back it was not, or not yet.
        """
        entry = self.entries.get(entry_id)
        return entry is not None and entry.complete and not entry.in_arena

    def announce(self, entry: StoredEntry) -> None:
        """The entry waits for room: from now on it can be selected."""
        self._offer(entry)

    def give_room(self, entry: StoredEntry) -> bool:
        """Take memory for a waiting entry, if it fits."""
        regions = self.arena.allocate(entry.draft.sizes)
        if regions is None:
            return False
        entry.place_regions(regions)
        entry.in_arena = True
        streaming = entry.draft.streaming
        entry.state = EntryState.STREAMING if streaming else EntryState.FILLING
        self._offer(entry)
        return True

    def adopt(self, entry: StoredEntry) -> bool:
        """Move a streaming entry that began outside into the arena, if it fits."""
        if not self.arena.adopt(entry.regions):
            return False
        entry.in_arena = True
        self.outside_bytes -= entry.nbytes
        for lease in entry.leases.values():
            self._uncharge(lease)
        return True

    def landed(self, entry: StoredEntry, index: int, digest: bytes) -> None:
        """One part of an entry is whole and verified."""
        if entry.state is EntryState.GONE or entry.parts[index].digest is not None:
            return
        entry.parts[index].digest = digest
        entry.landed.append(index)
        for lease in list(entry.leases.values()):
            if lease.is_valid:
                lease.holder.part_landed(lease, index)

    def commit(self, entry: StoredEntry) -> None:
        """Every part has landed: the entry is in, or with its direct consumer."""
        if entry.state is EntryState.GONE:
            return
        entry.complete = True
        if entry.state is EntryState.DIRECT:
            if not entry.leases:
                self._wait_again(entry)
        else:
            entry.state = EntryState.READY
            self.counters.inserted += 1
            if entry.draft.ttl_s is not None:
                entry.expires_at = self._now() + entry.draft.ttl_s
                self._expiry.add(entry.expires_at, entry.entry_id)
        for lease in list(entry.leases.values()):
            if lease.is_valid:
                lease.holder.completed(lease)
        self._offer(entry)

    def forsake(self, entry: StoredEntry) -> None:
        """The insert was cancelled or failed.

        What has not all landed leaves without a trace; a direct delivery that
        has belongs to its consumer alone from here on.
        """
        if self._leave_to_consumers(entry):
            return
        if entry.state not in (EntryState.GONE, EntryState.READY):
            self._abort(entry, "producer")

    def abort_streaming(self, entry: StoredEntry) -> None:
        """The writer failed: the entry is gone and its consumers learn of it."""
        if entry.state is not EntryState.GONE and not self._leave_to_consumers(entry):
            self.counters.aborted += 1
            self._abort(entry, "producer")

    def withdraw(self, entry_id: str) -> bool:
        """Remove an entry that waits or is READY and that nobody holds."""
        entry = self.entries.get(entry_id)
        waits = (EntryState.WAITING, EntryState.READY)
        if entry is None or entry.leases or entry.state not in waits:
            return False
        self.counters.withdrawn += 1
        self._leave(entry, "withdrawn")
        return True

    def select(
        self, query: Query, holder: Holder, fingerprint: KVFingerprint | None
    ) -> Waiter:
        """Lease the best entry to ``holder``, at once or as soon as one matches."""
        self._next_seq += 1
        waiter = Waiter(query, holder, self._next_seq, fingerprint)
        self.serve(waiter)
        return waiter

    def serve(self, waiter: Waiter) -> None:
        """Let a query that has no delivery (any more) have one, in its old place."""
        if waiter.is_forgotten or waiter.is_waiting or waiter.lease is not None:
            return
        if self._is_closed:
            waiter.holder.closed()
            return
        if waiter.query.entry_id is not None:
            found = find_by_id(self.entries, waiter)
        else:
            found = self._matchmaker.find(waiter)
        if found is not None:
            self._lease(found[0], waiter, found[1])
        else:
            self.counters.match_waits += 1
            self._matchmaker.enqueue(waiter)

    def forget(self, waiter: Waiter) -> None:
        """The query is cancelled; a delivery in its hand goes back."""
        waiter.is_forgotten = True
        self._matchmaker.dequeue(waiter)
        if waiter.lease is not None:
            self.give_back(waiter.lease, reached=False)

    def peek(self, query: Query, fingerprint: KVFingerprint | None) -> int:
        """Return the longest match among entries that could be selected now."""
        return self._matchmaker.peek(query, fingerprint)

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
        self._end(lease)
        entry.consumers.add(lease.holder.consumer)
        entry.acknowledged_tokens.add(lease.token)
        entry.deliveries_left -= 1
        self.counters.acknowledged += 1
        if entry.deliveries_left == 0:
            self._leave(entry, "")
        elif entry.owner_gone:
            if not entry.leases:
                self._leave(entry, "closed" if self._is_closed else "")
        elif entry.state is EntryState.DIRECT and entry.complete:
            self._wait_again(entry)
            self._offer(entry)
        elif not self._expire(entry):
            self._offer(entry)

    def give_back(self, lease: Lease, *, reached: bool) -> None:
        """End a delivery without an acknowledgement; a stale one is ignored.

        ``reached``: the application had it and failed, which counts towards
        ``max_deliver``.
        """
        entry = lease.entry
        if not lease.is_valid:
            return
        self._end(lease)
        self.counters.given_back += 1
        entry.failures += reached
        if entry.failures >= self._max_deliver:
            self.counters.undeliverable += 1
            logger.warning(
                "entry %s failed in %d consumers and is dropped",
                entry.entry_id,
                entry.failures,
            )
            self._abort(entry, "max_deliver")
        elif entry.owner_gone:
            if not entry.leases:
                self._leave(entry, "closed" if self._is_closed else "producer")
        elif entry.state is EntryState.DIRECT:
            if entry.complete:
                self._wait_again(entry)
                self._offer(entry)
        elif not self._expire(entry):
            self._offer(entry)

    def reach(self, lease: Lease) -> None:
        """The application has the delivery from now on: ``max_hold_s`` begins."""
        if lease.reached:
            return
        lease.reached = True
        if self._max_hold_s is not None and lease.is_valid:
            lease.lapse = asyncio.get_running_loop().call_later(
                self._max_hold_s, self._lapse, lease
            )

    def was_acknowledged(self, entry_id: str, token: bytes) -> bool:
        """Did that delivery count? Asked by a consumer whose link was cut."""
        entry = self.entries.get(entry_id)
        if entry is not None:
            return token in entry.acknowledged_tokens
        stone = self.tombstones.find(entry_id, self._now())
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
        stone = self.tombstones.find(entry_id, self._now())
        if stone is None:
            raise KeyError(f"no entry {entry_id!r} is here, or was in the last minutes")
        if stone.reason:
            raise EntryAborted(reason=stone.reason)
        future.set_result(None)
        return future

    def offer_waiting(self, entries: Iterable[StoredEntry]) -> None:
        """A consumer's receive bound has room again: look at waiting entries."""
        for entry in entries:
            if entry.state is EntryState.WAITING:
                self._offer(entry)

    def close(self) -> None:
        """Every query ends, and entries leave.

        What an application holds whole leaves when it is acknowledged or given
        back; no other delivery goes on, and no stream.
        """
        self._is_closed = True
        for waiter in self._matchmaker.everyone():
            waiter.holder.closed()
        for entry in list(self.entries.values()):
            leases = list(entry.leases.values())
            held = [x for x in leases if x.reached and not x.holder.streams]
            if not entry.complete or not held:
                self._abort(entry, "closed")
                continue
            entry.owner_gone = True
            self._matchmaker.show(entry)
            for lease in leases:
                if lease not in held:
                    self._end(lease)
                    self._take_back(lease, "closed")
        self._expiry.stop()
        self._changed()

    def _lease(self, entry: StoredEntry, waiter: Waiter, matched_tokens: int) -> None:
        entry.attempts += 1
        lease = Lease(entry, waiter, matched_tokens, entry.attempts)
        entry.leases[lease.token] = lease
        entry.consumers.add(waiter.holder.consumer)
        waiter.lease = lease
        self.counters.delivered += 1
        if entry.state is EntryState.WAITING:
            self._begin_outside(entry, lease)
        self._matchmaker.show(entry)
        waiter.holder.leased(lease)

    def _begin_outside(self, entry: StoredEntry, lease: Lease) -> None:
        lease.charged_bytes = entry.nbytes
        lease.holder.charge(entry.nbytes)
        entry.place_regions(self.arena.allocate_outside(entry.draft.sizes))
        self.outside_bytes += entry.nbytes
        self.counters.direct += 1
        streaming = entry.draft.streaming
        entry.state = EntryState.STREAMING if streaming else EntryState.DIRECT
        self._changed()

    def _wait_again(self, entry: StoredEntry) -> None:
        """A direct delivery ended but the entry stays: back to its old place."""
        self.outside_bytes -= entry.nbytes
        entry.drop_regions()
        entry.complete = False
        entry.state = EntryState.WAITING
        self._changed()

    def _lapse(self, lease: Lease) -> None:
        lease.lapse = None
        if lease.is_valid:
            self.counters.lapsed += 1
            logger.warning(
                "a consumer held entry %s for %s s; it is given back",
                lease.entry.entry_id,
                self._max_hold_s,
            )
            self.give_back(lease, reached=lease.reached)
            if lease.holder.streams:
                lease.holder.aborted(lease, "lapsed")

    def _end(self, lease: Lease) -> None:
        lease.entry.leases.pop(lease.token, None)
        lease.entry.consumers.discard(lease.holder.consumer)
        lease.waiter.lease = None
        if lease.lapse is not None:
            lease.lapse.cancel()
            lease.lapse = None
        self._uncharge(lease)

    def _uncharge(self, lease: Lease) -> None:
        if lease.charged_bytes:
            lease.holder.charge(-lease.charged_bytes)
            lease.charged_bytes = 0

    def _offer(self, entry: StoredEntry) -> None:
        """Lease the entry to as many waiting queries as may have it."""
        self._matchmaker.show(entry)
        while (found := self._matchmaker.next_for(entry)) is not None:
            self._lease(entry, found[0], found[1])

    def _abort(self, entry: StoredEntry, reason: str) -> None:
        leases = sorted(entry.leases.values(), key=lambda lease: lease.waiter.seq)
        for lease in leases:
            self._end(lease)
        self._leave(entry, reason)
        for lease in leases:
            self._take_back(lease, reason)

    def _take_back(self, lease: Lease, reason: str) -> None:
        """Tell the holder of an ended delivery that the entry will not come."""
        self.counters.retracted += 1
        if lease.holder.streams:
            lease.holder.aborted(lease, reason)
        elif not lease.reached:
            lease.holder.retracted(lease)
            self.serve(lease.waiter)

    def _leave_to_consumers(self, entry: StoredEntry) -> bool:
        """Its insert ends; bytes that all landed outside are its consumers' alone."""
        if entry.in_arena or not entry.complete or not entry.leases:
            return False
        entry.owner_gone = True
        self._matchmaker.show(entry)
        return True

    def _leave(self, entry: StoredEntry, reason: str) -> None:
        digest = entry.digest() if entry.complete else b""
        if not entry.in_arena and entry.regions:
            self.outside_bytes -= entry.nbytes
        traceless = reason == "producer" and not entry.complete
        entry.state = EntryState.GONE
        entry.left_by = reason
        self._matchmaker.show(entry)
        entry.release_regions()
        self.entries.pop(entry.entry_id, None)
        if not traceless or entry.draft.streaming:
            tokens = frozenset(entry.acknowledged_tokens)
            stone = Tombstone(reason, digest, tokens, self._now())
            self.tombstones.bury(entry.entry_id, stone)
        for future in list(entry.gone):
            if not future.done():
                if reason:
                    future.set_exception(EntryAborted(reason=reason))
                    future.exception()
                else:
                    future.set_result(None)
        self._changed()

    def _expire(self, entry: StoredEntry) -> bool:
        """Let a READY entry that nobody holds leave if its time is over."""
        over = entry.expires_at is not None and entry.expires_at <= self._now()
        if entry.state is not EntryState.READY or entry.leases or not over:
            return False
        self.counters.expired += 1
        logger.info("entry %s was not taken in time and leaves", entry.entry_id)
        self._leave(entry, "ttl")
        return True

    def _expire_id(self, entry_id: str) -> None:
        entry = self.entries.get(entry_id)
        if entry is not None:
            self._expire(entry)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
