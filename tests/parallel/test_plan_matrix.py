"""All that is promised of plans: numbers of ranks, block sizes and layouts, each pair.

What a read's copies are made of says nothing of ranks (``RankRead.ends``), so very many
plans of the matrix move alike. Each of its 3,250,208 plans is made; that each head is
read once, from a rank that has it, is looked at in all of them; and of those that move
alike, one is done with numbers for bytes and compared with the model of the whole
tensor. A default run does so with a share of them that has every pair of ranks and
every pair of blocks and layouts.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy
import numpy.typing
import pytest

from asynckv.parallel.copies import CopySide, Place, Span, StridedCopy
from asynckv.parallel.plans import RankRead, ReshardPlan, plan_reshard
from asynckv.parallel.shapes import EngineShape, KVLayout, Rank
from harness.whole_cache import (
    BLOCK_SIZES,
    HEADS,
    LAYOUTS,
    NOTHING,
    TP_SIZES,
    WholeCache,
)

_CUTS = [*itertools.product(LAYOUTS, LAYOUTS, BLOCK_SIZES, BLOCK_SIZES)]
_LATENT_CUTS = [
    (KVLayout.mla(), KVLayout.mla(), *pair)
    for pair in itertools.product(BLOCK_SIZES, BLOCK_SIZES)
]

_Cut: TypeAlias = tuple[KVLayout, KVLayout, int, int]
_Numbers: TypeAlias = numpy.typing.NDArray[numpy.int64]


def _can_be(heads: int, *sizes: int) -> bool:
    return all(not (heads % tp and tp % heads) for tp in sizes)


_PAIRS = [
    (heads, tp, other_tp)
    for heads, tp, other_tp in itertools.product(HEADS, TP_SIZES, TP_SIZES)
    if _can_be(heads, tp, other_tp)
]
_RANKS = [(*pair, Rank(tp=tp)) for pair in _PAIRS for tp in range(pair[2])]


@functools.cache
def _shape(layout: KVLayout, block: int, heads: int, tp: int) -> EngineShape:
    return EngineShape(
        layout=layout, block_size=block, key_nbytes=1, num_kv_heads=heads, tp_size=tp
    )


def _plans(
    heads: int, tp: int, other_tp: int, ranks: Iterable[Rank], cut: _Cut
) -> Iterator[ReshardPlan]:
    source = _shape(cut[0], cut[2], heads, tp)
    target = _shape(cut[1], cut[3], heads, other_tp)
    return (plan_reshard(source, target, rank) for rank in ranks)


class _Memory:
    """All regions of one rank, one after the other, as the model says they are."""

    def __init__(self, shape: EngineShape, rank: Rank, tokens: int) -> None:
        regions = WholeCache(shape, tokens).regions(shape, rank)
        self.numbers = numpy.concatenate([region.ravel() for region in regions])
        self._blocks = len(regions[0])
        self._nbytes = numpy.array([region.shape[1] for region in regions])
        self._starts = numpy.cumsum([0] + [region.size for region in regions])

    def at(self, regions: _Numbers, blocks: _Numbers, offsets: _Numbers) -> _Numbers:
        """Return where bytes of blocks are among the numbers."""
        assert 0 <= regions.min() <= regions.max() < len(self._nbytes)
        assert 0 <= blocks.min() <= blocks.max() < self._blocks
        nbytes = self._nbytes[regions]
        assert (0 <= offsets).all() and (offsets < nbytes).all()
        places: _Numbers = self._starts[regions] + blocks * nbytes + offsets
        return places


_memory = functools.lru_cache(maxsize=1024)(_Memory)


def _bytes_of(
    copy: StridedCopy, side: CopySide, tokens: int
) -> tuple[_Numbers, _Numbers, _Numbers]:
    """Return region, block and offset of each byte, in the order in which they move."""
    segments = numpy.array(copy.segments_of(Span(tokens)))
    regions = numpy.array([side.region])
    offsets = numpy.array([side.offset])
    for count, step in zip(copy.counts, side.steps, strict=True):
        ahead = numpy.arange(count)
        regions = (regions[:, None] + ahead * step.regions).ravel()
        offsets = (offsets[:, None] + ahead * step.nbytes).ravel()
    blocks, within = numpy.divmod(segments[:, None, None], side.segments)
    return (
        regions[:, None],
        blocks,
        within * side.segment_nbytes + offsets[:, None] + numpy.arange(copy.nbytes),
    )


def _check(plan: ReshardPlan) -> None:
    """Move it all, and compare what came with what the whole tensor says."""
    tokens = max(plan.source.block_size, plan.target.block_size) + 5
    here = _memory(plan.target, plan.rank, tokens)
    landed = numpy.full_like(here.numbers, NOTHING)
    arrivals = numpy.zeros_like(landed)
    for read in plan.reads:
        there = _memory(plan.source, read.source, tokens)
        for copy in read.copies:
            origins = there.at(*_bytes_of(copy, copy.source, tokens))
            places = here.at(*_bytes_of(copy, copy.target, tokens))
            landed[places] = there.numbers[origins]
            arrivals += numpy.bincount(places.ravel(), minlength=len(landed))
    assert (landed == here.numbers).all()
    assert (arrivals <= 1).all()
    assert (arrivals[here.numbers != NOTHING] == 1).all()


def _reads_each_head_once(plan: ReshardPlan, reads: Sequence[RankRead]) -> bool:
    heads = [head for read in reads for head in read.heads]
    return heads == [*plan.target.heads_of(plan.rank.tp)] and all(
        read.heads[0] in plan.source.heads_of(read.source.tp)
        and read.heads[-1] in plan.source.heads_of(read.source.tp)
        for read in reads
    )


def _likeness(reads: Sequence[RankRead]) -> int:
    """Return a number that plans have in common if all their copies are equal."""
    return hash(tuple((read.ends, read.layers, len(read.heads)) for read in reads))


def test_what_has_been_checked_is_what_a_plan_moves() -> None:
    for index, (heads, tp, other_tp, rank) in enumerate(_RANKS[::40]):
        cut = _CUTS[index * 97 % len(_CUTS)]
        (plan,) = _plans(heads, tp, other_tp, [rank], cut)
        for copy in (copy for read in plan.reads for copy in read.copies):
            moves = list(copy.moves(Span(140)))
            for side, places in (
                (copy.source, [move.source for move in moves]),
                (copy.target, [move.target for move in moves]),
            ):
                found = numpy.broadcast_arrays(*_bytes_of(copy, side, 140))
                first = zip(*(axis[:, :, 0].flat for axis in found), strict=True)
                assert [Place(*map(int, place)) for place in first] == places
            assert {move.nbytes for move in moves} == {copy.nbytes}


def test_a_share_of_all_pairs_is_exact() -> None:
    for index, cut in enumerate(_CUTS):
        heads, tp, other_tp, rank = _RANKS[index * 7 % len(_RANKS)]
        (plan,) = _plans(heads, tp, other_tp, [rank], cut)
        assert _reads_each_head_once(plan, plan.reads)
        _check(plan)


def test_ranks_that_heads_do_not_allow_are_refused_with_a_reason() -> None:
    refused = [
        pair for pair in itertools.product(HEADS, TP_SIZES) if not _can_be(*pair)
    ]
    assert len(refused) == len(HEADS) * len(TP_SIZES) - 38
    for heads, tp in refused:
        with pytest.raises(ValueError, match=f"num_kv_heads={heads} .* tp_size={tp}"):
            _shape(LAYOUTS[0], 16, heads, tp)


_checked: set[int] = set()


def _check_all(heads: int, tp: int, other_tp: int, cuts: Iterable[_Cut]) -> None:
    ranks = [Rank(tp=rank) for rank in range(other_tp)]
    for cut in cuts:
        for plan in _plans(heads, tp, other_tp, ranks, cut):
            reads = plan.reads
            assert _reads_each_head_once(plan, reads)
            likeness = _likeness(reads)
            if likeness not in _checked:
                _check(plan)
                _checked.add(likeness)


@pytest.mark.chaos
@pytest.mark.parametrize(("heads", "tp", "other_tp"), _PAIRS)
def test_every_byte_arrives_once_in_the_whole_matrix(
    heads: int, tp: int, other_tp: int
) -> None:
    _check_all(heads, tp, other_tp, _CUTS)


@pytest.mark.chaos
@pytest.mark.parametrize(("tp", "other_tp"), [*itertools.product(TP_SIZES, TP_SIZES)])
def test_every_byte_of_a_latent_arrives_once_in_the_whole_matrix(
    tp: int, other_tp: int
) -> None:
    _check_all(1, tp, other_tp, _LATENT_CUTS)
