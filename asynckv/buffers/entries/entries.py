"""What a lookup buffer holds: entries, their parts, the leases on them, and drafts.

Values and small facts about them only; every change of state is made in
:mod:`~asynckv.buffers.entries.table`, :mod:`~asynckv.buffers.entries.leases` and
:mod:`~asynckv.buffers.entries.ledger`. A draft is what an insert says about its entry,
checked: the same for every lookup buffer.
"""

from __future__ import annotations

import asyncio
import enum
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from asynckv.abc import TokenIds
from asynckv.buffers.entries.prefix_index import Place
from asynckv.devices.tensors import KVOnGpu
from asynckv.protocol.wire import digest_of
from asynckv.tensors.arena import Region
from asynckv.tensors.blocks import KVMemory, spec_in
from asynckv.tensors.paged_arena import SlabRegion
from asynckv.transfers.manifest import (
    INLINE_NBYTES,
    Layout,
    content_digest,
    layout_of,
    pack,
)
from asynckv.transfers.targets import Part
from asynckv.transfers.tokens import (
    Query,
    Tokens,
    as_entry_id,
    as_mask,
    as_tokens,
    key_of,
)
from asynckv.types import KVFingerprint, TensorSpec, as_count, as_seconds

__all__ = (
    "Draft",
    "EntryState",
    "Exported",
    "Holder",
    "Lease",
    "Payer",
    "StoredEntry",
    "Waiter",
    "make_draft",
    "specs_in",
)


_AT_A_TIME: Final = 32
"""As many tensors are looked at in less than half a millisecond."""


class Draft(msgspec.Struct, frozen=True, eq=False):
    """Everything an insert says about its entry, checked."""

    entry_id: str
    input_tokens: Tokens | None
    roi: Tokens | None
    layout: Layout
    fingerprint: KVFingerprint | None = None
    ttl_s: float | None = 600.0
    deliveries: int = 1
    streaming: bool = False
    borrowed: tuple[SlabRegion | None, ...] = ()
    """Memory of the arena's own that a tensor is in already, if any is."""

    @property
    def charged_bytes(self) -> int:
        """Bytes of the tokens and the roi, which need no memory of the arena."""
        tokens, roi = self.input_tokens, self.roi
        nbytes = 0 if tokens is None else len(tokens.data)
        return nbytes if roi is None else nbytes + len(roi.data)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors and of its tokens."""
        return self.layout.nbytes + self.charged_bytes


async def specs_in(tensors: Mapping[str, KVMemory | KVOnGpu]) -> dict[str, TensorSpec]:
    """Return shape and dtype of each tensor, so many in a step of the loop.

    :raises ValueError: one cannot be sent
    """
    specs = dict[str, TensorSpec]()
    for index, (name, tensor) in enumerate(tensors.items(), 1):
        specs[name] = spec_in(tensor)
        if not index % _AT_A_TIME:
            await asyncio.sleep(0)
    return specs


def make_draft(
    input_tokens: TokenIds | None,
    roi: TokenIds | None,
    specs: Mapping[str, TensorSpec],
    *,
    entry_id: str | None,
    ttl_s: float | None,
    deliveries: int,
    fingerprint: KVFingerprint | None = None,
    streaming: bool = False,
    borrowed: tuple[SlabRegion | None, ...] = (),
) -> Draft:
    """Check what a caller says about an entry, but for the names of its tensors.

    :raises ValueError: tokens and roi do not fit each other, or a number is out
        of range
    :raises TypeError: ``entry_id`` is no str, or a number none
    """
    deliveries = as_count(deliveries, "deliveries")
    ttl_s = as_seconds(ttl_s, "ttl_s")
    entry_id = os.urandom(16).hex() if entry_id is None else as_entry_id(entry_id)
    tokens = as_tokens(input_tokens)
    return Draft(
        entry_id=entry_id,
        input_tokens=tokens,
        roi=as_mask(roi, tokens),
        layout=layout_of(specs),
        fingerprint=fingerprint,
        ttl_s=ttl_s,
        deliveries=deliveries,
        streaming=streaming,
        borrowed=borrowed,
    )


_ACCOUNT_NBYTES: Final = 2048
_PART_NBYTES: Final = 1024
_KEPT_NBYTES: Final = 1024
"""So much of an offer is kept for the next one, and for the entry's digest."""

_KEPT_PARTS: Final = 16
"""Of more it is not made early: it would hardly be kept, and 16384 take 3 ms."""


class EntryState(enum.Enum):
    """Where an entry is in its life."""

    WAITING = "waits for room; can be selected"
    FILLING = "its bytes are on their way into the arena; can be selected"
    STREAMING = "its writer is at work; can be selected"
    READY = "committed; can be selected"
    DIRECT = "had no room; its bytes go straight to the one who selected it"
    GONE = "left"


class Exported(NamedTuple):
    """An entry as a peer is told of it who has the arena open; a whole one as all are.

    ``edges`` stay those of the first time: memory that changes later is noticed. What
    is ``beside`` lies where no peer can read it.
    """

    regions: Sequence[Region]
    places: bytes
    edges: bytes = b""
    beside: Sequence[Region] = ()


class StoredEntry:
    """One entry, from the moment its insert announces it until it has left."""

    __slots__ = (
        "_preamble",
        "account_nbytes",
        "acknowledged_tokens",
        "attempts",
        "charged_bytes",
        "complete",
        "consumers",
        "delivered_digest",
        "deliveries_left",
        "draft",
        "entry_id",
        "expires_at",
        "exported",
        "failures",
        "gone",
        "in_arena",
        "input_tokens",
        "is_outside",
        "is_small",
        "landed",
        "leases",
        "left_by",
        "nbytes",
        "owner_gone",
        "parts",
        "place",
        "regions",
        "roi",
        "seq",
        "sizes",
        "state",
    )

    def __init__(self, draft: Draft, seq: int) -> None:
        self.draft = draft
        self.entry_id = draft.entry_id
        self.seq = seq
        self.state = EntryState.WAITING
        self.parts = [Part(name, spec) for name, spec in draft.layout.specs.items()]
        self.regions: Sequence[Region] = ()
        """What it holds now: one a part."""
        self.input_tokens = draft.input_tokens
        self.roi = draft.roi
        self.sizes, self.charged_bytes = draft.layout.sizes, draft.charged_bytes
        tensor_nbytes = draft.layout.nbytes
        self.nbytes = tensor_nbytes + self.charged_bytes
        self.account_nbytes = _ACCOUNT_NBYTES + _PART_NBYTES * len(self.parts)
        """What it costs beside its bytes, about."""
        self.is_small = tensor_nbytes <= INLINE_NBYTES
        self.landed: list[int] = []
        self.complete = False
        self.place: Place[StoredEntry] | None = None
        self.leases: dict[bytes, Lease] = {}
        self.consumers: set[str] | None = set() if draft.deliveries > 1 else None
        """Who holds it or has acknowledged it, if that is more than one."""
        self.deliveries_left = draft.deliveries
        self.delivered_digest = b""
        """Of what consumers had whole while it had no room; its bytes are gone."""
        self.attempts = 0
        self.failures = 0
        self.expires_at: float | None = None
        self.owner_gone = False
        self.in_arena = self.is_outside = False
        self.left_by = ""
        self.acknowledged_tokens: list[bytes] = []
        self.gone: set[asyncio.Future[None]] = set()
        self._preamble: bytes | None = None
        self.exported: Exported | None = None
        """What a peer is told who maps the arena; of the regions that it holds now."""

    def key(self) -> bytes:
        """Return ``input_tokens[roi]`` as bytes (computed: the index keeps it)."""
        return key_of(self.input_tokens, self.roi)

    def digests(self) -> list[bytes]:
        """Return the digests known so far; those of other parts are empty."""
        return [part.digest or b"" for part in self.parts]

    def make_complete(self) -> None:
        """Every part has landed: what an offer begins with will not change."""
        self.complete = True
        is_short = self.charged_bytes <= _KEPT_NBYTES and len(self.parts) <= _KEPT_PARTS
        if self.is_small and is_short:
            self.preamble()  # while nobody waits for the offer

    def preamble(self) -> bytes:
        """Return its body up to the tensors, with the digests known so far."""
        if self._preamble is not None:
            return self._preamble
        preamble = pack(self.draft.layout, self.digests(), self.input_tokens, self.roi)
        if self.complete and len(preamble) <= _KEPT_NBYTES:
            self._preamble = preamble
        return preamble

    def digest(self) -> bytes:
        """Return the digest of the whole entry, once every part has landed."""
        if len(self.parts) == 1:  # nothing to sort: as content_digest, but cheap
            return digest_of(self.preamble())
        return content_digest(
            self.draft.layout, self.digests(), self.input_tokens, self.roi
        )

    def place_regions(self, regions: Sequence[Region]) -> None:
        """Give every part its memory; the tokens keep theirs."""
        self.regions = regions
        self.exported = None
        for part, region in zip(self.parts, regions, strict=False):
            part.region = region

    def drop_regions(self) -> None:
        """Let go of all memory, whose charge was given back."""
        self.regions = ()
        self.exported = None
        for part in self.parts:
            part.region = None

    def begin_again(self) -> None:
        """Forget what landed."""
        self.complete = False
        self.landed = []
        self._preamble = self.exported = None
        for part in self.parts:
            part.digest = None


class Payer(Protocol):
    """Whose receive bound takes bytes that have no room in the arena."""

    def may_charge(self, nbytes: int) -> bool:
        """Can it take so many more bytes?"""

    def charge(self, nbytes: int) -> None:
        """Charge it for such bytes; a negative number gives back."""


class Holder(Protocol):
    """Who selects, as the ledger sees it. Called on the loop; never waits."""

    consumer: str
    streams: bool

    @property
    def payer(self) -> Payer:
        """Who pays for bytes that have no room here."""

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

    def taken(self) -> None:
        """Others have the entry that the query names; it will not be served."""

    def closed(self) -> None:
        """The buffer is closed; the query will not be served."""


class Waiter(msgspec.Struct, eq=False):
    """One query, from its registration until it is forgotten or served."""

    # As Lease a Struct, because one is made for each delivery.
    query: Query
    holder: Holder
    seq: int
    fingerprint: KVFingerprint | None
    is_forgotten: bool = False
    place: Place[Waiter] | None = None
    lease: Lease | None = None

    def __repr__(self) -> str:
        return f"<Waiter {self.seq}>"  # asyncio's debug mode would show the prompt

    @property
    def is_waiting(self) -> bool:
        """Is it in line?"""
        return self.place is not None

    def may_have(self, entry: StoredEntry) -> bool:
        """May the consumer have a delivery of an entry that has one left?"""
        if not entry.complete:
            if entry.state is EntryState.FILLING and self.holder.streams:
                return False  # if it fails, no application must have seen it
            if entry.state is EntryState.WAITING:
                if not self.holder.payer.may_charge(entry.nbytes):
                    return False
        # Each delivery goes to another consumer.
        return entry.consumers is None or self.holder.consumer not in entry.consumers


class Lease(msgspec.Struct, eq=False):
    """One delivery. Its random ``token`` fences late acknowledgements.

    It is valid until it is acknowledged, given back or taken back.
    """

    entry: StoredEntry
    waiter: Waiter
    matched_tokens: int
    attempt: int
    token: bytes
    is_valid: bool = True
    reached: bool = False
    charged_bytes: int = 0
    lapse: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Lease {self.attempt} of entry {self.entry.entry_id}>"

    @property
    def holder(self) -> Holder:
        return self.waiter.holder

    def hold(self, max_hold_s: float, lapsed: Callable[[Lease], None]) -> None:
        """Call ``lapsed`` if it is still held after so long, counted anew."""
        if self.lapse is not None:
            self.lapse.cancel()
        loop = asyncio.get_running_loop()
        self.lapse = loop.call_later(max_hold_s, lapsed, self)

    def charge(self) -> None:
        """Let the consumer pay for bytes that have no room here."""
        self.charged_bytes = self.entry.nbytes
        self.holder.payer.charge(self.charged_bytes)

    def uncharge(self) -> None:
        """Give back what the consumer paid, if it did."""
        if self.charged_bytes:
            self.holder.payer.charge(-self.charged_bytes)
            self.charged_bytes = 0
