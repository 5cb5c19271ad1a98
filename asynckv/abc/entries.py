"""What a lookup buffer holds: tokens, and the KV that belongs to them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

if TYPE_CHECKING:
    import torch

    from asynckv.tensors.blocks import KVMemory
else:

    class _TorchWhenAsked:
        """Imports torch for whoever evaluates annotations: help(), say, or Sphinx."""

        def __getattr__(self, name: str) -> object:
            return getattr(importlib.import_module("torch"), name)

    torch = _TorchWhenAsked()

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
    ``None``: ``key_tensor``, ``value_tensor`` and ``layers`` are the same, for who
    knows which. ``extras`` holds further named tensors. ``matched_tokens`` counts
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

    def __repr__(self) -> str:
        tokens = 0 if self.input_tokens is None else len(self.input_tokens)
        return (
            f"<KVEntry {self.entry_id!r}, {tokens} tokens, {self.nbytes} bytes, "
            f"attempt {self.attempt}>"
        )

    @property
    def key_tensor(self) -> torch.Tensor:
        """The key, where it is one tensor.

        :raises TypeError: it is one a layer (see :attr:`layers`), or there is none
        """
        return _one_tensor("key", self.key)

    @property
    def value_tensor(self) -> torch.Tensor:
        """The value, where it is one tensor.

        :raises TypeError: it is one a layer (see :attr:`layers`), or there is none
        """
        return _one_tensor("value", self.value)

    @property
    def layers(self) -> Mapping[str, tuple[torch.Tensor, ...]]:
        """Each layer's tensors by its name: its key and its value, or the one it has.

        ``for name, (key, value) in entry.layers.items()``.

        :raises TypeError: key or value is one tensor, or there is neither
        """
        found: dict[str, tuple[torch.Tensor, ...]] = {}
        for what, part in (("key", self.key), ("value", self.value)):
            if part is not None and not isinstance(part, Mapping):
                raise TypeError(
                    f"the {what} of this entry is one tensor: use entry.{what}_tensor"
                )
            for name, tensor in (part or {}).items():
                found[name] = (*found.get(name, ()), tensor)
        if self.key is None and self.value is None:
            raise TypeError("this entry has neither a key nor a value")
        return found

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


def _one_tensor(what: str, part: KVTensors) -> torch.Tensor:
    if part is None:
        raise TypeError(f"this entry has no {what}")
    if isinstance(part, Mapping):
        raise TypeError(f"this entry has a {what} for each layer: use entry.layers")
    return part
