"""The resharding plan: what a rank reads, from whom, and where each byte of it goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from fractions import Fraction

import msgspec

from asynckv.errors import IncompatiblePeer
from asynckv.parallel.copies import (
    Held,
    Move,
    Span,
    StridedCopy,
    copies_between,
    region_block_nbytes,
)
from asynckv.parallel.shapes import EngineShape, Rank, check_same_model

__all__ = ("RankRead", "ReshardPlan", "plan_rearrange", "plan_reshard", "readers_of")


@dataclasses.dataclass(frozen=True, slots=True)
class RankRead:
    """What one rank reads from one rank of another engine.

    ``layers`` and ``heads`` are counted as the model's.
    """

    plan: ReshardPlan = dataclasses.field(repr=False)
    source: Rank
    layers: range
    heads: range

    @property
    def copies(self) -> tuple[StridedCopy, ...]:
        """How it moves, between all regions of the two ranks."""
        return self._copies(*self.ends, len(self.layers))

    @property
    def ends(self) -> tuple[Held, Held]:
        """Where it begins at both ranks.

        That, and how many layers and heads it has, is all that ``copies`` are made of:
        reads that are alike in it move alike, whatever engines they are between.
        """
        source, target = self.plan.source, self.plan.target
        theirs = source.layers_of(self.source.pp)
        ours = target.layers_of(self.plan.rank.pp)
        return (
            self._held(source, self.source.tp, len(theirs), self.layers[0] - theirs[0]),
            self._held(target, self.plan.rank.tp, len(ours), self.layers[0] - ours[0]),
        )

    def copies_of_layer(self, layer: int) -> tuple[StridedCopy, ...]:
        """Return how one layer moves, for those who hand it over by itself.

        Where a layer has tensors of its own the regions are counted among the
        layer's; where it has none they are those of all layers, as in ``copies``.

        :raises ValueError: this read does not have the layer
        """
        if layer not in self.layers:
            raise ValueError(f"layer {layer} is not among {self.layers}")
        source, target = self.plan.source, self.plan.target
        return self._copies(
            self._held_layer(source, self.source, layer),
            self._held_layer(target, self.plan.rank, layer),
            1,
        )

    def _copies(
        self, source: Held, target: Held, layers: int
    ) -> tuple[StridedCopy, ...]:
        return copies_between(source, target, layers=layers, heads=len(self.heads))

    def _held_layer(self, shape: EngineShape, rank: Rank, layer: int) -> Held:
        if not shape.layout.is_across_layers:
            return self._held(shape, rank.tp, 1, 0)
        layers = shape.layers_of(rank.pp)
        return self._held(shape, rank.tp, len(layers), layer - layers[0])

    def _held(self, shape: EngineShape, tp: int, layers: int, first: int) -> Held:
        first_head = self.heads[0] - shape.heads_of(tp)[0]
        return Held(shape.of_one_rank(layers), first, first_head)


@dataclasses.dataclass(frozen=True, slots=True)
class ReshardPlan:
    """All that ``rank`` of an engine shaped like ``target`` reads from the ``source``.

    Each head of each layer of the rank is in exactly one of ``reads``.
    """

    source: EngineShape
    target: EngineShape
    rank: Rank

    @property
    def reads(self) -> tuple[RankRead, ...]:
        """What is read from whom, in the order of their ranks."""
        layers = self.target.layers_of(self.rank.pp)
        return tuple(
            RankRead(self, Rank(stage, tp), shared, heads)
            for stage in range(self.source.pp_size)
            if (shared := _shared(layers, self.source.layers_of(stage)))
            for tp, heads in _heads_from(self.source, self.target, self.rank.tp)
        )

    @property
    def source_ranks(self) -> tuple[Rank, ...]:
        """Whom the rank reads from."""
        return tuple(read.source for read in self.reads)

    @property
    def is_identity(self) -> bool:
        """Whether whole blocks move as they are, each to where it was: one to one."""
        return (
            len(self.reads) == 1
            and self.source.layout == self.target.layout
            and self.source.block_size == self.target.block_size
            and self.source.heads_per_rank == self.target.heads_per_rank
            and self.source.layers_of(self.source_ranks[0].pp)
            == self.target.layers_of(self.rank.pp)
        )

    def moves(self, span: Span) -> Iterator[tuple[Rank, Move]]:
        """Yield each contiguous piece and whom it comes from."""
        for read in self.reads:
            for copy in read.copies:
                for move in copy.moves(span):
                    yield read.source, move


def plan_reshard(source: EngineShape, target: EngineShape, rank: Rank) -> ReshardPlan:
    """Plan what ``rank`` of the ``target`` reads from the ``source``.

    Any two shapes of one model will do: tensor parallel sizes need not divide each
    other, nor block sizes, and layouts may differ.

    :raises IncompatiblePeer: they cannot be of one model
    :raises ValueError: the target has no such rank
    """
    check_same_model(source, target)
    target.layers_of(rank.pp)
    target.heads_of(rank.tp)
    return ReshardPlan(source, target, rank)


def plan_rearrange(
    source: EngineShape, target: EngineShape, rank: Rank
) -> tuple[StridedCopy, ...]:
    """Return what is left to do where blocks were received as the source has them.

    That is when a rank has received its own heads and layers, no others, in the block
    size and the layout of the ``source``, whatever that one's ranks are.

    :raises IncompatiblePeer: they cannot be of one model, or a token takes more bytes
        on one side: then blocks back to back are not where they would be sought
    :raises ValueError: the target has no such rank
    """
    alike = msgspec.structs.replace(
        source, tp_size=target.tp_size, stages=target.stages
    )
    check_same_model(source, target)
    _check_same_tokens(alike, target, len(target.layers_of(rank.pp)))
    (read,) = plan_reshard(alike, target, rank).reads
    return read.copies


def _check_same_tokens(source: EngineShape, target: EngineShape, layers: int) -> None:
    """Refuse regions whose blocks hold the same tokens in more bytes, or in fewer."""
    theirs, ours = (
        [
            Fraction(nbytes, shape.block_size)
            for nbytes in region_block_nbytes(shape, layers)
        ]
        for shape in (source, target)
    )
    if len(theirs) == len(ours) and theirs != ours:
        raise IncompatiblePeer(
            f"a token takes {theirs[0]} bytes of a region there and {ours[0]} here",
            field="layout",
            hint="rows padded otherwise cannot be put in place: use plan_reshard()",
        )


def readers_of(
    source: EngineShape, target: EngineShape, rank: Rank
) -> tuple[Rank, ...]:
    """Return which ranks of the ``target`` read from ``rank`` of the ``source``.

    As many deliveries as there are of them an entry of this rank takes. With replicated
    heads there may be none: then nobody needs what this rank holds.

    :raises IncompatiblePeer: they cannot be of one model
    :raises ValueError: the source has no such rank
    """
    check_same_model(source, target)
    layers, _ = source.layers_of(rank.pp), source.heads_of(rank.tp)
    readers = [
        tp
        for tp in range(target.tp_size)
        if any(found == rank.tp for found, _ in _heads_from(source, target, tp))
    ]
    return tuple(
        Rank(stage, tp)
        for stage in range(target.pp_size)
        if _shared(layers, target.layers_of(stage))
        for tp in readers
    )


def _heads_from(
    source: EngineShape, target: EngineShape, tp_rank: int
) -> Iterator[tuple[int, range]]:
    """Yield from which ranks of a stage come which heads.

    Of the ranks that hold the same heads each reader takes one: the first the first,
    and so on, so that all of them are read from if there are as many readers.
    """
    wanted = target.heads_of(tp_rank)
    reader = tp_rank % target.replicas
    chosen = reader * source.replicas // target.replicas
    first, last = (head // source.heads_per_rank for head in (wanted[0], wanted[-1]))
    for group in range(first, last + 1):
        rank = group * source.replicas + chosen
        yield rank, _shared(wanted, source.heads_of(rank))


def _shared(some: range, others: range) -> range:
    return range(max(some.start, others.start), min(some.stop, others.stop))
