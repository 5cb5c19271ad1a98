"""What a lookup buffer holds: tokens, and the KV that belongs to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

if TYPE_CHECKING:
    import torch

    from asynckv.tensors.blocks import KVMemory

__all__ = ("KVEntry", "KVSource", "KVTensors", "Match", "TokenIds")

KVTensors: TypeAlias = "torch.Tensor | Mapping[str, torch.Tensor] | None"
"""The key or value of an entry: one tensor, one a layer by name, or nothing."""

KVSource: TypeAlias = "KVMemory | Mapping[str, KVMemory] | None"
"""The key or value of an insert: each tensor may be blocks of a paged cache."""

TokenIds: TypeAlias = "torch.Tensor | Sequence[int]"
"""One-dimensional token ids, or a mask (``roi``) over them."""

Match: TypeAlias = Literal["prefix", "exact"]


class KVEntry(msgspec.Struct, frozen=True, eq=False, weakref=True):
    """One entry of a lookup buffer. Unpacks as the original's five fields.

    ``key`` and ``value`` are a tensor, a mapping of layer name to tensor, or
    ``None``; ``extras`` holds further named tensors. ``matched_tokens`` counts
    the selected tokens on which query and entry agree (0 if it was selected
    without tokens). ``attempt`` is above 1 for a delivery that is repeated.
    """

    input_tokens: torch.Tensor | None
    roi: torch.Tensor | None
    key: KVTensors
    value: KVTensors
    hidden: torch.Tensor | None
    extras: Mapping[str, torch.Tensor] = msgspec.field(default_factory=dict)
    entry_id: str = ""
    matched_tokens: int = 0
    attempt: int = 1

    def __iter__(self) -> Iterator[KVTensors]:
        return iter((self.input_tokens, self.roi, self.key, self.value, self.hidden))

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors, tokens and roi included."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor it holds."""
        for part in (*self, self.extras):
            if isinstance(part, Mapping):
                yield from part.values()
            elif part is not None:
                yield part
