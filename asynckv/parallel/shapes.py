"""What an engine's KV is cut into: heads over its ranks, layers over its stages.

How a cache lies in memory is said by a descriptor, never guessed from a shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from asynckv.errors import IncompatiblePeer
from asynckv.types import as_count

__all__ = (
    "CROSS_LAYER_LAYOUTS",
    "EngineShape",
    "KVLayout",
    "Rank",
    "TokenOrder",
    "check_same_model",
    "split_layers",
)


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


_MAX: Final = {
    "tp_size": 2**10,
    "block_size": 2**20,
    "num_kv_heads": 2**16,
    "key_nbytes": 2**20,
}
_MAX_STAGES: Final = 2**8
_MAX_LAYERS: Final = 2**14

_OF_THE_MODEL: Final = ("num_layers", "num_kv_heads", "key_nbytes", "value_nbytes")


class Rank(NamedTuple):
    """One worker of an engine: its pipeline stage, and its rank within that."""

    pp: int = 0
    tp: int = 0


class EngineShape(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True
):
    """An engine's ranks, blocks and layout, and what it knows of the model.

    ``num_kv_heads`` are the model's, before any division; ``key_nbytes`` and
    ``value_nbytes`` are those of one head of one token in one layer, without padding.
    By default a value is as large as a key. With MLA there is one head without value,
    and ``key_nbytes`` is the latent. ``stages`` are the layers of each pipeline stage.

    With fewer heads than ranks each head is whole on several ranks. It is a plain
    value: peers tell it each other, and all that is in it is checked.

    :raises ValueError: it cannot be: what and why are named
    """

    layout: KVLayout
    block_size: int
    key_nbytes: int
    value_nbytes: int | None = None
    num_kv_heads: int = 1
    tp_size: int = 1
    stages: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        for name, most in _MAX.items():
            if not 1 <= as_count(getattr(self, name), name, least=0) <= most:
                raise ValueError(f"{name}={getattr(self, name)} is not 1 to {most}")
        if not 1 <= len(self.stages) <= _MAX_STAGES or min(self.stages) < 1:
            raise ValueError(f"stages={self.stages[:8]}: each has one layer or more")
        if sum(self.stages) > _MAX_LAYERS:
            raise ValueError(
                f"stages={self.stages[:8]}: more than {_MAX_LAYERS} layers"
            )
        if self.num_kv_heads % self.tp_size and self.tp_size % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} cannot be divided over "
                f"tp_size={self.tp_size}, nor the other way round"
            )
        self._check_value()

    def _check_value(self) -> None:
        if self.layout.is_mla:
            if self.num_kv_heads != 1 or self.value_nbytes:
                raise ValueError("MLA has one head (num_kv_heads=1) and no value")
            msgspec.structs.force_setattr(self, "value_nbytes", 0)
        elif self.value_nbytes is None:
            msgspec.structs.force_setattr(self, "value_nbytes", self.key_nbytes)
        elif not 1 <= self.value_nbytes <= _MAX["key_nbytes"]:
            raise ValueError(f"value_nbytes={self.value_nbytes}")

    @property
    def is_mla(self) -> bool:
        """That of the layout."""
        return self.layout.is_mla

    @property
    def pp_size(self) -> int:
        """How many pipeline stages there are."""
        return len(self.stages)

    @property
    def num_layers(self) -> int:
        """How many layers all stages have."""
        return sum(self.stages)

    @property
    def heads_per_rank(self) -> int:
        """How many heads each rank holds: at least one."""
        return max(1, self.num_kv_heads // self.tp_size)

    @property
    def replicas(self) -> int:
        """How many ranks of a stage hold the same heads. With MLA all of them do."""
        return max(1, self.tp_size // self.num_kv_heads)

    @property
    def is_kv_replicated(self) -> bool:
        """Whether a head is on several ranks: there are more ranks than heads."""
        return self.replicas > 1

    @property
    def part_nbytes(self) -> tuple[int, ...]:
        """Bytes of a head's key and of its value; with MLA of the latent alone."""
        return (
            (self.key_nbytes, self.value_nbytes)
            if self.value_nbytes
            else (self.key_nbytes,)
        )

    def heads_of(self, tp_rank: int) -> range:
        """Return the heads that a rank holds.

        :raises ValueError: there is no such rank
        """
        if not 0 <= tp_rank < self.tp_size:
            raise ValueError(f"there is no rank {tp_rank} with tp_size={self.tp_size}")
        first = tp_rank // self.replicas * self.heads_per_rank
        return range(first, first + self.heads_per_rank)

    def layers_of(self, pp_rank: int) -> range:
        """Return the layers that a stage has, counted over all stages.

        :raises ValueError: there is no such stage
        """
        if not 0 <= pp_rank < self.pp_size:
            raise ValueError(f"there is no stage {pp_rank} with pp_size={self.pp_size}")
        first = sum(self.stages[:pp_rank])
        return range(first, first + self.stages[pp_rank])

    def of_one_rank(self, layers: int) -> EngineShape:
        """Return an engine that has what one rank with so many layers has, no more."""
        return msgspec.structs.replace(
            self, num_kv_heads=self.heads_per_rank, tp_size=1, stages=(layers,)
        )

    def ranks(self) -> Iterator[Rank]:
        """Yield all ranks, stage by stage."""
        for pp in range(self.pp_size):
            for tp in range(self.tp_size):
                yield Rank(pp, tp)


def split_layers(num_layers: int, pp_size: int) -> tuple[int, ...]:
    """Return the layers of each stage as vLLM divides them by default.

    What is left over goes to the stages before the last, the later the sooner.

    :raises ValueError: there are fewer layers than stages, or no stage
    """
    if not 1 <= pp_size <= num_layers:
        raise ValueError(f"{num_layers} layers cannot make {pp_size} stages")
    least, left = divmod(num_layers, pp_size)
    gets_one_more = range(pp_size - 1 - left, pp_size - 1)
    return tuple(least + (stage in gets_one_more) for stage in range(pp_size))


def check_same_model(local: EngineShape, remote: EngineShape) -> None:
    """Refuse two shapes that cannot be of one model.

    :raises IncompatiblePeer: ``field`` names what differs
    """
    if local.is_mla != remote.is_mla:
        raise _differs("layout", local.layout.axes, remote.layout.axes)
    for field in _OF_THE_MODEL:
        ours, theirs = getattr(local, field), getattr(remote, field)
        if ours != theirs:
            raise _differs(field, ours, theirs)


def _differs(field: str, ours: object, theirs: object) -> IncompatiblePeer:
    return IncompatiblePeer(
        f"{field} is {ours} here and {theirs} there",
        field=field,
        hint="both engines must run the same model with the same cache dtype",
    )
