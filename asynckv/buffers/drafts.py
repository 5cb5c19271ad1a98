"""What an insert says about its entry, checked: the same for every lookup buffer."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Mapping
from typing import Final

from asynckv.abc import TokenIds
from asynckv.buffers.arguments import as_count, as_entry_id, as_seconds
from asynckv.buffers.queries import Tokens, as_mask, as_tokens
from asynckv.tensors.blocks import KVMemory, spec_in
from asynckv.tensors.on_gpu import KVOnGpu
from asynckv.tensors.slab_regions import SlabRegion
from asynckv.types import KVFingerprint, TensorSpec

__all__ = ("Draft", "make_draft", "specs_in")

_AT_A_TIME: Final = 32
"""As many tensors are looked at in less than half a millisecond."""


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
    lent: tuple[SlabRegion | None, ...] = ()
    """Memory of the arena's own that a tensor is in already, if any is."""

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        return [spec.nbytes for spec in self.specs.values()]

    @property
    def charges(self) -> list[int]:
        """Bytes of the tokens and the roi, which need no memory of the arena."""
        return [len(t.data) for t in (self.input_tokens, self.roi) if t is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors and of its tokens."""
        return sum(self.sizes) + sum(self.charges)


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
    lent: tuple[SlabRegion | None, ...] = (),
) -> Draft:
    """Check what a caller says about an entry, but for the names of its tensors.

    :raises ValueError: tokens and roi do not fit each other, or a number is out
        of range
    :raises TypeError: ``entry_id`` is no str, or a number none
    """
    deliveries = as_count(deliveries, "deliveries")
    ttl_s = as_seconds(ttl_s, "ttl_s")
    entry_id = uuid.uuid4().hex if entry_id is None else as_entry_id(entry_id)
    tokens = as_tokens(input_tokens)
    return Draft(
        entry_id=entry_id,
        input_tokens=tokens,
        roi=as_mask(roi, tokens),
        specs=dict(specs),
        fingerprint=fingerprint,
        ttl_s=ttl_s,
        deliveries=deliveries,
        streaming=streaming,
        lent=lent,
    )
