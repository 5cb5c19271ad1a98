"""What a lookup buffer holds: entries, their parts, and the leases on them.

Values and small facts about them only; every change of state is made by the
:class:`~asynckv.buffers.ledger.Ledger`.
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

    def __init__(self, draft: Draft, seq: int) -> None:
        self.draft = draft
        self.seq = seq
        self.state = EntryState.WAITING
        self.parts = [Part(name, spec) for name, spec in draft.specs.items()]
        self.token_regions: list[Region] = []
        self.input_tokens = draft.input_tokens
        self.roi = draft.roi
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
        self.acknowledged_tokens: set[bytes] = set()
        self.gone: set[asyncio.Future[None]] = set()
        self._records: tuple[TensorRecord, ...] | None = None

    @property
    def entry_id(self) -> str:
        return self.draft.entry_id

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors, tokens and roi."""
        return sum(self.draft.sizes)

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


@dataclasses.dataclass(slots=True, eq=False)
class Lease:
    """One delivery. Its random ``token`` fences late acknowledgements."""

    entry: StoredEntry
    waiter: Waiter
    matched_tokens: int
    attempt: int
    reached: bool = False
    charged_bytes: int = 0
    lapse: asyncio.TimerHandle | None = None
    token: bytes = dataclasses.field(default_factory=lambda: os.urandom(16))

    @property
    def holder(self) -> Holder:
        return self.waiter.holder

    @property
    def is_valid(self) -> bool:
        """Does the entry still know this delivery?"""
        return self.entry.leases.get(self.token) is self
