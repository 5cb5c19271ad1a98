"""What a lookup buffer holds: entries, their parts, and the leases on them.

Values and small facts about them only; every change of state is made in
:mod:`~asynckv.buffers.book`, :mod:`~asynckv.buffers.leases` and
:mod:`~asynckv.buffers.ledger`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import os
from collections.abc import Sequence
from typing import Protocol

from asynckv.buffers.manifest import content_digest
from asynckv.buffers.matching import Place
from asynckv.buffers.queries import Query, Tokens, key_of
from asynckv.protocol.frames import TensorRecord
from asynckv.tensors.arena import Region
from asynckv.types import KVFingerprint, TensorSpec

__all__ = ("Draft", "EntryState", "Holder", "Lease", "Part", "StoredEntry", "Waiter")


class EntryState(enum.Enum):
    """Where an entry is in its life."""

    WAITING = "waits for room; can be selected"
    FILLING = "its bytes are on their way into the arena; can be selected"
    STREAMING = "its writer is at work; can be selected"
    READY = "committed; can be selected"
    DIRECT = "had no room; its bytes go straight to the one who selected it"
    GONE = "left"


@dataclasses.dataclass(frozen=True, slots=True)
class Draft:
    """Everything an insert says about its entry, checked."""

    entry_id: str
    input_tokens: Tokens | None
    roi: Tokens | None
    specs: dict[str, TensorSpec]
    fingerprint: KVFingerprint | None = None
    ttl_s: float | None = 600.0
    deliveries: int = 1
    streaming: bool = False
    owner: str = ""

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor, then of the tokens and the roi."""
        tokens = [len(t.data) for t in (self.input_tokens, self.roi) if t is not None]
        return [spec.nbytes for spec in self.specs.values()] + tokens


@dataclasses.dataclass(slots=True)
class Part:
    """One tensor of an entry. ``digest`` is set when it has landed."""

    name: str
    spec: TensorSpec
    region: Region | None = None
    digest: bytes | None = None


class StoredEntry:
    """One entry, from the moment its insert announces it until it has left."""

    __slots__ = (
        "_records",
        "acknowledged_tokens",
        "attempts",
        "complete",
        "consumers",
        "deliveries_left",
        "draft",
        "entry_id",
        "expires_at",
        "failures",
        "gone",
        "in_arena",
        "input_tokens",
        "landed",
        "leases",
        "left_by",
        "nbytes",
        "owner_gone",
        "parts",
        "place",
        "roi",
        "seq",
        "state",
        "tensor_nbytes",
        "token_regions",
    )

    def __init__(self, draft: Draft, seq: int) -> None:
        self.draft = draft
        self.entry_id = draft.entry_id
        self.seq = seq
        self.state = EntryState.WAITING
        self.parts = [Part(name, spec) for name, spec in draft.specs.items()]
        self.token_regions: list[Region] = []
        self.input_tokens = draft.input_tokens
        self.roi = draft.roi
        self.nbytes = sum(draft.sizes)
        self.tensor_nbytes = sum(spec.nbytes for spec in draft.specs.values())
        self.landed: list[int] = []
        self.complete = False
        self.place: Place[StoredEntry] | None = None
        self.leases: dict[bytes, Lease] = {}
        self.consumers: set[str] = set()
        """Who holds it or has acknowledged it."""
        self.deliveries_left = draft.deliveries
        self.attempts = 0
        self.failures = 0
        self.expires_at: float | None = None
        self.owner_gone = False
        self.in_arena = False
        self.left_by = ""
        self.acknowledged_tokens: list[bytes] = []
        self.gone: set[asyncio.Future[None]] = set()
        self._records: tuple[TensorRecord, ...] | None = None

    @property
    def regions(self) -> list[Region]:
        """Every region it holds now."""
        own = [part.region for part in self.parts if part.region is not None]
        return own + self.token_regions

    def key(self) -> bytes:
        """Return ``input_tokens[roi]`` as bytes (computed: the index keeps it)."""
        return key_of(self.input_tokens, self.roi)

    def records(self) -> tuple[TensorRecord, ...]:
        """Return the manifest of its tensors, with the digests known so far."""
        if self._records is not None:
            return self._records
        records = tuple(
            TensorRecord(part.name, part.spec, part.digest or b"")
            for part in self.parts
        )
        if self.complete:
            self._records = records
        return records

    def digest(self) -> bytes:
        """Return the digest of the whole entry, once every part has landed."""
        return content_digest(self.records(), self.input_tokens, self.roi)

    def place_regions(self, regions: Sequence[Region]) -> None:
        """Give every part its memory; the tokens keep theirs, and are charged."""
        rest = list(regions)
        for part in self.parts:
            part.region = rest.pop(0)
        self.token_regions = rest

    def release_regions(self) -> None:
        """Let go of all memory."""
        for region in self.regions:
            region.release()
        for part in self.parts:
            part.region = None
        self.token_regions = []

    def drop_regions(self) -> None:
        """Let go of all memory, to begin again."""
        self.release_regions()
        for part in self.parts:
            part.digest = None
        self.landed = []
        self._records = None


class Holder(Protocol):
    """Who selects, as the ledger sees it. Called on the loop; never waits."""

    consumer: str
    streams: bool

    def may_charge(self, nbytes: int) -> bool:
        """Can the consumer's receive bound take bytes that have no room here?"""

    def charge(self, nbytes: int) -> None:
        """Charge the consumer for such bytes; a negative number gives back."""

    def leased(self, lease: Lease) -> None:
        """An entry was selected; parts that landed already are in the lease."""

    def part_landed(self, lease: Lease, index: int) -> None:
        """One more part has landed."""

    def completed(self, lease: Lease) -> None:
        """The entry is committed: nothing more comes."""

    def retracted(self, lease: Lease) -> None:
        """The entry will not come after all; the query waits again."""

    def aborted(self, lease: Lease, reason: str) -> None:
        """The producer failed; a stream ends with ``EntryAborted``."""

    def closed(self) -> None:
        """The buffer is closed; the query will not be served."""


class Waiter:
    """One query, from its registration until it is forgotten or served."""

    __slots__ = (
        "fingerprint",
        "holder",
        "is_forgotten",
        "is_waiting",
        "lease",
        "place",
        "query",
        "seq",
    )

    def __init__(
        self,
        query: Query,
        holder: Holder,
        seq: int,
        fingerprint: KVFingerprint | None,
    ) -> None:
        self.query = query
        self.holder = holder
        self.seq = seq
        self.fingerprint = fingerprint
        self.is_waiting = False
        self.is_forgotten = False
        self.place: Place[Waiter] | None = None
        self.lease: Lease | None = None


class Lease:
    """One delivery. Its random ``token`` fences late acknowledgements.

    It is valid until it is acknowledged, given back or taken back.
    """

    __slots__ = (
        "attempt",
        "charged_bytes",
        "entry",
        "holder",
        "is_valid",
        "lapse",
        "matched_tokens",
        "reached",
        "token",
        "waiter",
    )

    def __init__(
        self, entry: StoredEntry, waiter: Waiter, matched_tokens: int, attempt: int
    ) -> None:
        self.entry = entry
        self.waiter = waiter
        self.holder = waiter.holder
        self.matched_tokens = matched_tokens
        self.attempt = attempt
        self.token = os.urandom(16)
        self.is_valid = True
        self.reached = False
        self.charged_bytes = 0
        self.lapse: asyncio.TimerHandle | None = None

    def charge(self, nbytes: int) -> None:
        """Let the consumer pay for bytes that have no room here."""
        self.charged_bytes = nbytes
        self.holder.charge(nbytes)

    def uncharge(self) -> None:
        """Give back what the consumer paid, if it did."""
        if self.charged_bytes:
            self.holder.charge(-self.charged_bytes)
            self.charged_bytes = 0
