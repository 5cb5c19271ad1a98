"""What an insert says about its entry, checked: the same for every lookup buffer."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import uuid
from collections.abc import Mapping
from typing import Final

from asynckv.abc import TokenIds
from asynckv.buffers.queries import MAX_ID_LENGTH, Tokens, as_mask, as_tokens
from asynckv.tensors.blocks import KVMemory, spec_in
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


async def specs_in(
    tensors: Mapping[str, KVMemory], *, on_gpu: bool = False
) -> dict[str, TensorSpec]:
    """Return shape and dtype of each tensor, so many in a step of the loop.

    With ``on_gpu`` they may be there too.

    :raises ValueError: one cannot be sent
    """
    specs = dict[str, TensorSpec]()
    for index, (name, tensor) in enumerate(tensors.items(), 1):
        specs[name] = spec_in(tensor, on_gpu=on_gpu)
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
    """
    if not 1 <= deliveries <= 2**31:
        raise ValueError("deliveries is at least 1, and at most 2**31")
    if entry_id is not None and len(entry_id) > MAX_ID_LENGTH:
        raise ValueError(f"an entry_id has at most {MAX_ID_LENGTH} characters")
    if ttl_s is not None and not 0 <= ttl_s < math.inf:
        raise ValueError("ttl_s is finite and not negative; None means no end")
    tokens = as_tokens(input_tokens)
    return Draft(
        entry_id=uuid.uuid4().hex if entry_id is None else entry_id,
        input_tokens=tokens,
        roi=as_mask(roi, tokens),
        specs=dict(specs),
        fingerprint=fingerprint,
        ttl_s=ttl_s,
        deliveries=deliveries,
        streaming=streaming,
        lent=lent,
    )
