"""How a KV cache lies in memory: said by a descriptor, never guessed from a shape."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

__all__ = ("CROSS_LAYER_LAYOUTS", "KVLayout", "TokenOrder")

TokenOrder: TypeAlias = Literal["NHD", "HND"]
"""Whether a block has all heads of a token together, or all tokens of a head."""

CROSS_LAYER_LAYOUTS: Final = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""The layouts that vLLM names. C is a head's key and value side by side."""

_WITH_HEADS: Final = sorted("LKBNH")
_MLA: Final = sorted("LBN")


class KVLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The order of a KV cache's dimensions, outermost first.

    ``axes`` has a letter for each: **L**\\ ayer, **K** (first the keys, then the
    values), **B**\\ lock, **N** (tokens of a block), **H**\\ ead; the bytes of one head
    come last and have none. Layers first is one tensor a layer, or one that could be
    cut into those. What stands before B are *regions*: pools of blocks of their own,
    counted in the order of their axes. What stands after B lies within a block.

    ``row_align_nbytes`` is what each head's key, and its value, is padded to.

    :raises ValueError: the axes are no such order
    """

    axes: str
    row_align_nbytes: int = 1

    def __post_init__(self) -> None:
        if sorted(self.axes) not in (_WITH_HEADS, _MLA):
            raise ValueError(
                f"{self.axes!r} orders neither L, K, B, N, H nor, for MLA, L, B, N"
            )
        if self.axes.index("N") < self.axes.index("B"):
            raise ValueError(f"{self.axes!r}: the tokens of a block lie within it")
        if not 1 <= self.row_align_nbytes <= 2**16:
            raise ValueError(f"row_align_nbytes={self.row_align_nbytes}")

    @classmethod
    def kv_first(cls, order: TokenOrder = "NHD") -> KVLayout:
        """Keys apart from values: ``(2, blocks, ...)`` a layer."""
        return cls("LKB" + _within(order))

    @classmethod
    def blocks_first(cls, order: TokenOrder = "NHD") -> KVLayout:
        """A block has its keys, then its values: ``(blocks, 2, ...)`` a layer."""
        return cls("LBK" + _within(order))

    @classmethod
    def fused(cls, order: TokenOrder = "NHD") -> KVLayout:
        """A head's key and value lie side by side: ``(blocks, ..., 2 * size)``."""
        return cls("LB" + _within(order) + "K")

    @classmethod
    def mla(cls) -> KVLayout:
        """One latent a token, whole on each rank: ``(blocks, tokens, size)``."""
        return cls("LBN")

    @classmethod
    def pallas(cls, row_align_nbytes: int = 1) -> KVLayout:
        """Keys and values by turns: ``(blocks, tokens, 2 * heads, padded size)``."""
        return cls("LBNHK", row_align_nbytes)

    @classmethod
    def named(cls, name: str) -> KVLayout:
        """Return one of vLLM's named layouts, ``"BLHNC"`` for example.

        :raises ValueError: vLLM has none of that name
        """
        if name not in CROSS_LAYER_LAYOUTS:
            raise ValueError(f"{name!r} is none of {', '.join(CROSS_LAYER_LAYOUTS)}")
        return cls(name[:-1] + "K")

    @property
    def is_mla(self) -> bool:
        """Whether a token has one latent instead of keys and values a head."""
        return "K" not in self.axes

    @property
    def is_across_layers(self) -> bool:
        """Whether a block has the tokens of all layers, so that no layer is apart."""
        return "L" in self.inner

    @property
    def split_k_and_v(self) -> bool:
        """Whether keys and values are regions apart (as the original's member)."""
        return "K" in self.outer

    @property
    def is_kv_layout_blocks_first(self) -> bool:
        """Whether a block has first all its keys, then all its values.

        As the original's member: false where key and value lie side by side.
        """
        return "K" in self.inner and not self.axes.endswith("K")

    @property
    def outer(self) -> str:
        """The axes of regions."""
        return self.axes[: self.axes.index("B")]

    @property
    def inner(self) -> str:
        """The axes within a block."""
        return self.axes[self.axes.index("B") + 1 :]

    def row_nbytes(self, nbytes: int) -> int:
        """Return what a head's key or value of so many bytes takes, padded."""
        return -(-nbytes // self.row_align_nbytes) * self.row_align_nbytes


def _within(order: TokenOrder) -> str:
    if order not in ("NHD", "HND"):
        raise ValueError(f"{order!r} is neither 'NHD' nor 'HND'")
    return order[:2]
