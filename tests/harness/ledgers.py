"""A lookup buffer's state, driven step by step, and who asks for and holds entries."""

from __future__ import annotations

from collections.abc import Sequence

from asynckv.buffers.entries.entries import Draft, Lease, StoredEntry, Waiter
from asynckv.buffers.entries.ledger import Ledger
from asynckv.buffers.lower_tiers import LowerTiers, Name, Owner
from asynckv.tensors.arena import HeapArena
from asynckv.transfers.manifest import layout_of
from asynckv.transfers.tokens import Query, as_tokens, make_query
from asynckv.types import TensorSpec

__all__ = (
    "RecordingHolder",
    "RecordingTiers",
    "SteppedLedger",
    "draft_of",
)


class RecordingHolder:
    """A :class:`~asynckv.buffers.entries.entries.Holder` without a life of its own.

    ``heard`` lists what it was told; ``bound`` is its receive bound in bytes.
    """

    def __init__(
        self, consumer: str = "consumer", *, streams: bool = False, bound: int = 2**40
    ) -> None:
        self.consumer = consumer
        self.streams = streams
        self.bound = bound
        self.charged_bytes = 0
        self.heard: list[str] = []
        self.lease: Lease | None = None

    @property
    def payer(self) -> RecordingHolder:
        return self

    @property
    def entry_id(self) -> str | None:
        """Which entry it holds now."""
        return None if self.lease is None else self.lease.entry.entry_id

    def held(self) -> Lease:
        """Return its delivery.

        :raises RuntimeError: it has none
        """
        if self.lease is None:
            raise RuntimeError(f"{self.consumer} holds nothing")
        return self.lease

    def may_charge(self, nbytes: int) -> bool:
        return self.charged_bytes + nbytes <= self.bound

    def charge(self, nbytes: int) -> None:
        self.charged_bytes += nbytes

    def leased(self, lease: Lease) -> None:
        self.lease = lease
        self.heard.append(f"leased {lease.entry.entry_id}")

    def part_landed(self, lease: Lease, index: int) -> None:
        self.heard.append(f"landed {index}")

    def completed(self, lease: Lease) -> None:
        self.heard.append("completed")

    def retracted(self, lease: Lease) -> None:
        self.lease = None
        self.heard.append("retracted")

    def aborted(self, lease: Lease, reason: str) -> None:
        self.lease = None
        self.heard.append(f"aborted {reason}")

    def taken(self) -> None:
        self.heard.append("taken")

    def closed(self) -> None:
        self.heard.append("closed")


def draft_of(
    entry_id: str,
    tokens: tuple[int, ...] = (1,),
    nbytes: int = 8,
    *,
    deliveries: int = 1,
    streaming: bool = False,
    ttl_s: float | None = None,
) -> Draft:
    """Return what an insert of one ``key`` tensor of ``nbytes`` says."""
    return Draft(
        entry_id=entry_id,
        input_tokens=as_tokens(list(tokens)),
        roi=None,
        layout=layout_of({"key": TensorSpec((nbytes,), "uint8")}),
        ttl_s=ttl_s,
        deliveries=deliveries,
        streaming=streaming,
    )


_ONE = make_query([1], None)


class SteppedLedger:
    """A ledger and its line for room; its parts are ``table`` and ``leases``.

    Entries are as :func:`~harness.ledgers.draft_of` makes them.
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


class RecordingTiers(LowerTiers):
    """They have nothing, and remember what they are told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Name | Owner]] = []

    def stored(self, name: Name) -> None:
        self.told.append(("stored", name))

    def used(self, keys: Sequence[str], owner: Owner) -> None:
        self.told += [("used", (key, owner)) for key in keys]

    def deleted(self, name: Name) -> None:
        self.told.append(("deleted", name))

    def cleared(self, owner: Owner) -> None:
        self.told.append(("cleared", owner))

    async def fetch(self, keys: Sequence[str], owner: Owner) -> None: ...

    async def where(self, keys: Sequence[str], owner: Owner) -> Sequence[Sequence[str]]:
        return [()] * len(keys)

    async def touch(self, keys: Sequence[str], owner: Owner) -> None: ...
