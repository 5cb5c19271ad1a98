"""Bodies of entries, as a peer would send them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from asynckv.transfers.manifest import layout_of, pack
from asynckv.transfers.tokens import Tokens
from asynckv.types import TensorSpec

__all__ = ("body_with",)


def body_with(
    specs: Mapping[str, TensorSpec],
    inline: Iterable[memoryview] = (),
    *,
    digests: Sequence[bytes] | None = None,
    tokens: Tokens | None = None,
    roi: Tokens | None = None,
) -> bytes:
    """Return the body of an entry of these tensors, by default without digests."""
    digests = [b""] * len(specs) if digests is None else digests
    return pack(layout_of(specs), digests, tokens, roi, inline)
