"""A lookup buffer's state without anybody who waits: driven step by step."""

from __future__ import annotations

from asynckv.buffers.entries.entries import StoredEntry, Waiter
from asynckv.buffers.entries.ledger import Ledger
from asynckv.tensors.arena import HeapArena
from asynckv.transfers.tokens import Query, make_query
from harness.holders import RecordingHolder, draft_of

__all__ = ("SteppedLedger",)

_ONE = make_query([1], None)


class SteppedLedger:
    """A ledger and its line for room; its parts are ``table`` and ``leases``.

    Entries are as :func:`~harness.holders.draft_of` makes them.
    """

    def __init__(
        self, max_bytes: int = 100, *, max_hold_s: float | None = None
    ) -> None:
        self.arena = HeapArena(max_bytes)
        self.ledger = Ledger(self.arena, max_deliver=2, max_hold_s=max_hold_s)
        self.table = self.ledger.table
        self.leases = self.ledger.leases
        self.room = self.ledger.room

    def begin(
        self,
        entry_id: str,
        tokens: tuple[int, ...] = (1,),
        nbytes: int = 8,
        *,
        deliveries: int = 1,
        streaming: bool = False,
        ttl_s: float | None = None,
    ) -> StoredEntry:
        """Let an insert get in line for room."""
        entry = self.table.admit(
            draft_of(
                entry_id,
                tokens,
                nbytes,
                deliveries=deliveries,
                streaming=streaming,
                ttl_s=ttl_s,
            )
        )
        self.ledger.ask_for_room(entry)
        return entry

    def finish(self, entry: StoredEntry) -> None:
        """Let its bytes land, and commit it."""
        self.ledger.landed(entry, 0, b"d")
        self.ledger.commit(entry)

    def insert(
        self,
        entry_id: str,
        tokens: tuple[int, ...] = (1,),
        nbytes: int = 8,
        *,
        deliveries: int = 1,
        ttl_s: float | None = None,
    ) -> StoredEntry:
        """Bring a whole entry in."""
        entry = self.begin(entry_id, tokens, nbytes, deliveries=deliveries, ttl_s=ttl_s)
        self.finish(entry)
        return entry

    def select(
        self, query: Query = _ONE, consumer: str = "consumer", *, streams: bool = False
    ) -> tuple[RecordingHolder, Waiter]:
        """Let a consumer ask for an entry."""
        holder = RecordingHolder(consumer, streams=streams)
        return holder, self.leases.select(query, holder, None)
