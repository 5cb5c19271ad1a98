"""Which queries wait in a buffer. With ``stays`` the only look inside of one."""

from __future__ import annotations

from asynckv import KVFingerprint, LookupBuffer
from asynckv.buffers.entries.entries import Holder, Waiter
from asynckv.buffers.entries.leases import find_by_id
from asynckv.transfers.tokens import Query

__all__ = ("WaitingSelects",)


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
