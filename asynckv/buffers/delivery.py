"""One offer of a peer and what has come of it: from its manifest to an entry."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec
import torch

from asynckv.abc import KVEntry
from asynckv.buffers.contents import unflatten
from asynckv.buffers.manifest import INLINE_NBYTES, Manifest, verify
from asynckv.buffers.queries import tensor_of
from asynckv.buffers.receive_budget import ReceiveBudget
from asynckv.buffers.targets import match_targets
from asynckv.links.receiving import Reception
from asynckv.protocol.digests import digest_of
from asynckv.protocol.frames import Offer
from asynckv.tensors.blocks import KVMemory, memory_of, tensor_at
from asynckv.tensors.runs import Memory, fill
from asynckv.tensors.views import tensor_from

if TYPE_CHECKING:
    from asynckv.buffers.map_reader import MappedParts

__all__ = ("Delivery",)

_AT_A_TIME: Final = 16
"""Tensors take their time to be made, on the loop."""


class Delivery(msgspec.Struct, eq=False):
    """One offer and what has come of it. Nothing here waits for anybody.

    ``landed`` names those of its ``tensors`` that are verified, in the order in
    which they came. ``charged_bytes`` is what the receive bound holds for it. What
    is ``mapped`` lies in memory of the peer.
    """

    offer: Offer
    manifest: Manifest
    mapped: MappedParts | None = None
    has_completed: bool = False
    landed: list[str] = []
    tensors: dict[str, torch.Tensor] = {}
    reception: Reception | None = None
    charged_bytes: int = 0

    def __repr__(self) -> str:
        # Of no token and no tensor: reading one of a GPU would wait for that.
        return f"<Delivery {self.offer.transfer} of {self.manifest.nbytes} bytes>"

    @property
    def is_complete(self) -> bool:
        """The entry is committed, be it since its offer or before it."""
        return self.offer.complete or self.has_completed

    @property
    def is_whole(self) -> bool:
        """Every part is verified and the entry committed."""
        is_complete = self.offer.complete or self.has_completed
        return is_complete and len(self.landed) == len(self.manifest.records)

    @property
    def is_small(self) -> bool:
        """Small enough for an acknowledgement that is not waited for."""
        return self.offer.inline or self.manifest.nbytes <= INLINE_NBYTES

    def read_inline(self, targets: Mapping[str, KVMemory]) -> None:
        """Verify what rode with the offer, and copy it to memory of its own.

        :raises ChecksumError: some bytes changed on their way
        :raises ValueError: ``targets`` do not fit the entry
        """
        manifest = self.manifest
        if targets:
            match_targets(manifest.specs, targets)
        for record, piece in zip(manifest.records, manifest.inline, strict=True):
            verify(record, digest_of(piece))
            if record.name in targets:
                target = targets[record.name]
                fill(memory_of(target), piece)  # at most 64 KiB
                self.tensors[record.name] = tensor_at(target)
            else:
                self.tensors[record.name] = tensor_from(piece, record.spec)
        self.landed = [*self.tensors]

    def own_nbytes(self, targets: Mapping[str, KVMemory]) -> int:
        """Return how many bytes need memory of their own.

        :raises ValueError: ``targets`` do not fit the entry
        """
        specs = self.manifest.specs
        match_targets(specs, targets)
        return sum(spec.nbytes for name, spec in specs.items() if name not in targets)

    async def allocate(
        self, targets: Mapping[str, KVMemory], budget: ReceiveBudget
    ) -> list[Memory]:
        """Make the tensors, and return the memory that is to be filled.

        The loop goes on in between. A cancelled call leaves nothing.
        """
        tensors, memory = dict[str, torch.Tensor](), list[Memory]()
        for index, (name, spec) in enumerate(self.manifest.specs.items(), 1):
            place = targets[name] if name in targets else budget.empty(spec)
            tensors[name] = tensor_at(place)
            memory.append(memory_of(place))
            if not index % _AT_A_TIME:
                await asyncio.sleep(0)
        self.tensors = tensors
        return memory

    def land(self, tensors: dict[str, torch.Tensor]) -> None:
        """All of it is there: the peer's memory is kept by views of it alone."""
        self.tensors = tensors
        self.landed = [*tensors]
        self.mapped = None

    def forget(self) -> None:
        """Keep no tensor alive: they were handed out."""
        self.tensors = {}
        self.let_go()

    def let_go(self) -> None:
        """Nothing more is read in the peer's memory, whoever keeps this object."""
        if self.mapped is not None:
            self.mapped.let_go()
            self.mapped = None

    def uncharge(self, budget: ReceiveBudget) -> None:
        """Give what it was charged with back, once."""
        if self.charged_bytes:
            budget.release(self.charged_bytes)
            self.charged_bytes = 0

    def entry(self) -> KVEntry:
        """Return the entry, whole."""
        offer, manifest = self.offer, self.manifest
        key, value, hidden, extras = unflatten(self.tensors.items())
        return KVEntry(
            tensor_of(manifest.input_tokens),
            tensor_of(manifest.roi),
            key,
            value,
            hidden,
            extras,
            entry_id=offer.entry_id,
            matched_tokens=offer.matched_tokens,
            attempt=offer.attempt,
        )
