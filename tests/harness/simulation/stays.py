"""Looks inside of a buffer: when entries came and left, and which queries wait."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence

from asynckv import KVFingerprint, LookupBuffer
from asynckv.buffers.entries.entries import Draft, Holder, StoredEntry, Waiter
from asynckv.buffers.entries.leases import find_by_id
from asynckv.transfers.tokens import Query

__all__ = (
    "Stay",
    "Stays",
    "WaitingSelects",
)


@dataclasses.dataclass(eq=False)
class Stay:
    """One entry in one buffer, in virtual time; it may come again under its id."""

    came: float
    committed: float | None = None
    left: float = math.inf
    reason: str = ""
    """Why it left: nothing for its last acknowledgement."""


class Stays:
    """The stays of one buffer's entries, from its first moment on.

    Looks inside of it as :class:`WaitingSelects` does, but takes only the moments
    from there: whether they are right is judged by what applications did.
    """

    def __init__(self, buffer: LookupBuffer, now: Callable[[], float]) -> None:
        self._now = now
        self._of: dict[str, list[Stay]] = collections.defaultdict(list)
        table = buffer.ledger.table
        admit, make_ready, leave = table.admit, table.make_ready, table.remove

        def admit_and_note(draft: Draft) -> StoredEntry:
            entry = admit(draft)
            self.come(entry.entry_id)
            return entry

        def make_ready_and_note(entry: StoredEntry) -> None:
            make_ready(entry)
            self.commit(entry.entry_id)

        def leave_and_note(entry: StoredEntry, reason: str) -> None:
            leave(entry, reason)
            self.leave(entry.entry_id, reason)

        vars(table)["admit"] = admit_and_note
        vars(table)["make_ready"] = make_ready_and_note
        vars(table)["remove"] = leave_and_note

    def come(self, entry_id: str) -> None:
        """An entry begins to be here."""
        self._of[entry_id].append(Stay(self._now()))

    def commit(self, entry_id: str) -> None:
        """It is whole; its ttl counts from now."""
        self._of[entry_id][-1].committed = self._now()

    def leave(self, entry_id: str, reason: str) -> None:
        """It is not here any more."""
        stay = self._of[entry_id][-1]
        stay.left, stay.reason = self._now(), reason

    def of(self, entry_id: str) -> Sequence[Stay]:
        """Return the stays under that id, in their order."""
        return self._of.get(entry_id, ())


class WaitingSelects:
    """The queries that were made of one buffer, from its first moment on."""

    def __init__(self, buffer: LookupBuffer) -> None:
        self._table = buffer.ledger.table
        self._leases = buffer.ledger.leases
        self._waiters: list[Waiter] = []
        select = self._leases.select

        def select_and_note(
            query: Query, holder: Holder, fingerprint: KVFingerprint | None
        ) -> Waiter:
            waiter = select(query, holder, fingerprint)
            self._waiters.append(waiter)
            return waiter

        vars(self._leases)["select"] = select_and_note

    def beside_their_match(self) -> dict[str, str]:
        """Return the queries that wait although an entry is there, and its id."""
        self._waiters = [w for w in self._waiters if not w.is_forgotten]
        found = {}
        for waiter in self._waiters:
            if waiter.is_waiting and (entry_id := self._match(waiter)):
                found[f"query {waiter.seq} of {waiter.holder.consumer}"] = entry_id
        return found

    def _match(self, waiter: Waiter) -> str:
        if waiter.query.entry_id is not None:
            match = find_by_id(self._table.entries, waiter)
        else:
            match = self._leases._matcher.find(waiter)
        return "" if match is None else match[0].entry_id
