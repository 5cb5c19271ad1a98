from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import numpy
import pytest
from hypothesis import given, settings, strategies as st

from asynckv.errors import IncompatiblePeer
from asynckv.parallel.copies import Span
from asynckv.parallel.plans import (
    ReshardPlan,
    plan_rearrange,
    plan_reshard,
    readers_of,
)
from asynckv.parallel.shapes import EngineShape, KVLayout, Rank
from harness.whole_cache import (
    BLOCK_SIZES,
    HEADS,
    LAYOUTS,
    NOTHING,
    TP_SIZES,
    WholeCache,
)

_PAIRS = [
    (heads, source, target)
    for heads, source, target in itertools.product(HEADS, TP_SIZES, TP_SIZES)
    if all(not (heads % tp and tp % heads) for tp in (source, target))
]


@dataclasses.dataclass(frozen=True)
class _Engine:
    """What differs between two engines of one model."""

    layout: KVLayout = LAYOUTS[0]
    tp: int = 1
    block: int = 16
    stages: tuple[int, ...] = (2,)

    def shape(self, heads: int = 4, sizes: tuple[int, int] = (1, 1)) -> EngineShape:
        return EngineShape(
            layout=self.layout,
            block_size=self.block,
            key_nbytes=sizes[0],
            value_nbytes=0 if self.layout.is_mla else sizes[1],
            num_kv_heads=heads,
            tp_size=self.tp,
            stages=self.stages,
        )


def _check(plan: ReshardPlan, span: Span) -> None:
    """Move it all, and compare what came with what the whole tensor says."""
    first = max(span.source_start, span.target_start)
    whole = WholeCache(plan.source, span.tokens, first)
    expected = whole.regions(plan.target, plan.rank)
    landed = [numpy.full_like(region, NOTHING) for region in expected]
    arrivals = [numpy.zeros_like(region) for region in expected]
    lent = {rank: whole.regions(plan.source, rank) for rank in plan.source_ranks}
    skipped = span.source_start // plan.source.block_size
    here = span.target_start // plan.target.block_size
    for rank, ((of, block, at), (region, landing, to), nbytes) in plan.moves(span):
        piece = lent[rank][of][block + skipped, at : at + nbytes]
        place = here + landing, slice(to, to + nbytes)
        assert len(piece) == nbytes
        landed[region][place] = piece
        arrivals[region][place] += 1
    for came, times, should in zip(landed, arrivals, expected, strict=True):
        assert (came == should).all()
        assert (times <= 1).all()
        assert (times[should != NOTHING] == 1).all()


def _check_some(
    source: EngineShape, target: EngineShape, ranks: Iterable[Rank]
) -> None:
    tokens = max(source.block_size, target.block_size) + 5
    for rank in ranks:
        _check(plan_reshard(source, target, rank), Span(tokens))


def _some_ranks(shape: EngineShape) -> set[Rank]:
    return {Rank(0, tp) for tp in (0, shape.tp_size // 3, shape.tp_size - 1)}


@pytest.mark.parametrize("heads", HEADS)
def test_every_byte_arrives_once_between_any_two_numbers_of_ranks(heads: int) -> None:
    for _, *sizes in (pair for pair in _PAIRS if pair[0] == heads):
        source, target = (_Engine(tp=tp, block=4).shape(heads) for tp in sizes)
        _check_some(source, target, _some_ranks(target))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.axes)
def test_every_byte_arrives_once_between_any_two_layouts(layout: KVLayout) -> None:
    for other in LAYOUTS:
        source = _Engine(layout, tp=2, block=4).shape(4, (3, 2))
        target = _Engine(other, tp=1, block=8).shape(4, (3, 2))
        _check_some(source, target, [Rank()])
        _check_some(target, source, [Rank(tp=1)])


@pytest.mark.parametrize("blocks", [*itertools.product(BLOCK_SIZES, BLOCK_SIZES)])
def test_every_byte_arrives_once_between_any_two_block_sizes(
    blocks: tuple[int, int],
) -> None:
    for layout, other in ((0, 1), (4, 2), (5, 10)):
        source = _Engine(LAYOUTS[layout], block=blocks[0]).shape(2)
        target = _Engine(LAYOUTS[other], tp=2, block=blocks[1]).shape(2)
        _check_some(source, target, [Rank(tp=1)])


_engines = st.builds(
    _Engine,
    st.sampled_from(LAYOUTS),
    block=st.sampled_from((2, 3, 4, 8)),
    stages=st.sampled_from(((3,), (1, 2), (2, 1), (1, 1, 1))),
)


@given(
    st.sampled_from(_PAIRS),
    _engines,
    _engines,
    st.sampled_from(((1, 1), (2, 3))),
    st.integers(1, 30),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_every_byte_arrives_once_between_any_two_engines(
    pair: tuple[int, int, int],
    one: _Engine,
    other: _Engine,
    sizes: tuple[int, int],
    tokens: int,
    data: st.DataObject,
) -> None:
    source = dataclasses.replace(one, tp=pair[1]).shape(pair[0], sizes)
    target = dataclasses.replace(other, tp=pair[2]).shape(pair[0], sizes)
    starts = [
        data.draw(st.integers(0, tokens // shape.block_size)) * shape.block_size
        for shape in (source, target)
    ]
    rank = data.draw(st.sampled_from(list(target.ranks())))
    _check(plan_reshard(source, target, rank), Span(tokens, *starts))


@pytest.mark.parametrize(
    ("tp", "other_tp"), [*itertools.product((1, 2, 3, 8), repeat=2)]
)
def test_a_latent_is_whole_on_each_rank(tp: int, other_tp: int) -> None:
    source = _Engine(KVLayout.mla(), tp, 16).shape(1, (5, 0))
    target = _Engine(KVLayout.mla(), other_tp, 64).shape(1, (5, 0))
    _check_some(source, target, target.ranks())
    _check_some(target, source, source.ranks())


def test_whole_blocks_move_at_once_where_both_sides_are_alike() -> None:
    shape = _Engine(tp=2, block=16).shape(8, (64, 64))
    plan = plan_reshard(shape, shape, Rank(tp=1))
    assert plan.is_identity
    (copy,) = plan.reads[0].copies
    assert (copy.nbytes, copy.counts) == (16 * 4 * 64, (4,))  # 2 layers' keys, values


def test_a_plan_is_as_short_as_its_strides_whatever_it_moves() -> None:
    source = _Engine(KVLayout.kv_first("NHD"), 1, 128, (80,)).shape(32, (256, 256))
    target = _Engine(KVLayout.blocks_first("HND"), 2, 16, (40, 40)).shape(
        32, (256, 256)
    )
    plan = plan_reshard(source, target, Rank(1, 1))
    (copy,) = plan.reads[0].copies
    assert sorted(copy.counts) == [2, 16, 16, 40]
    assert not plan.is_identity


@pytest.mark.parametrize("heads", HEADS)
def test_as_many_read_a_rank_as_it_delivers_to(heads: int) -> None:
    for _, tp, other_tp in (pair for pair in _PAIRS if pair[0] == heads):
        source = _Engine(tp=tp, stages=(1, 1)).shape(heads)
        target = _Engine(tp=other_tp, stages=(2,)).shape(heads)
        read = [
            (rank, who)
            for who in target.ranks()
            for rank in plan_reshard(source, target, who).source_ranks
        ]
        delivered = [
            (rank, who)
            for rank in source.ranks()
            for who in readers_of(source, target, rank)
        ]
        assert sorted(read) == sorted(delivered)


@pytest.mark.parametrize("heads", HEADS)
def test_ranks_with_the_same_heads_share_their_readers_out(heads: int) -> None:
    for _, tp, other_tp in (pair for pair in _PAIRS if pair[0] == heads):
        source, target = (_Engine(tp=size).shape(heads) for size in (tp, other_tp))
        counts = [len(readers_of(source, target, rank)) for rank in source.ranks()]
        for first in range(0, tp, source.replicas):
            alike = counts[first : first + source.replicas]
            assert sum(alike) >= 1
            if target.replicas >= source.replicas:
                assert max(alike) - min(alike) <= 1


def test_one_layer_moves_by_itself() -> None:
    source = _Engine(KVLayout.kv_first(), stages=(2, 3)).shape()
    target = _Engine(KVLayout.named("BLHNC"), stages=(5,)).shape()
    plan = plan_reshard(source, target, Rank())
    assert [list(read.layers) for read in plan.reads] == [[0, 1], [2, 3, 4]]
    (copy,) = plan.reads[1].copies_of_layer(3)
    assert (copy.source.region, copy.target.region) == (0, 0)
    assert copy.target.offset == 3 * 16 * 4 * 2
    with pytest.raises(ValueError, match="layer 0 is not among"):
        plan.reads[1].copies_of_layer(0)


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (_Engine(stages=(3,)).shape(4), "num_layers"),
        (_Engine().shape(2), "num_kv_heads"),
        (_Engine().shape(4, (2, 1)), "key_nbytes"),
        (_Engine().shape(4, (1, 2)), "value_nbytes"),
        (_Engine(KVLayout.mla()).shape(1), "layout"),
    ],
)
def test_engines_of_different_models_are_refused(
    other: EngineShape, field: str
) -> None:
    shape = _Engine().shape(4)
    with pytest.raises(IncompatiblePeer, match=f"{field} is") as caught:
        plan_reshard(shape, other, Rank())
    assert caught.value.field == field
    with pytest.raises(IncompatiblePeer, match=f"{field} is"):
        readers_of(shape, other, Rank())


@pytest.mark.parametrize("rank", [Rank(1, 0), Rank(0, 2), Rank(-1, 0), Rank(0, -1)])
def test_a_rank_that_is_not_there_reads_nothing(rank: Rank) -> None:
    shape = _Engine(tp=2).shape(4)
    for ask in (plan_reshard, readers_of):
        with pytest.raises(ValueError, match="there is no"):
            ask(shape, shape, rank)


def test_what_was_received_as_the_source_has_it_moves_within_each_region() -> None:
    source = _Engine(KVLayout.kv_first("HND"), 1, 16, (1, 1)).shape()
    target = _Engine(KVLayout.kv_first("NHD"), 2, 64, (2,)).shape()
    (copy,) = plan_rearrange(source, target, Rank(tp=1))
    assert copy.region_pairs == 4
    for pair in copy.between_regions():
        assert pair.source.region == pair.target.region
    other = _Engine(stages=(3,)).shape()
    with pytest.raises(IncompatiblePeer, match="num_layers is 3 here and 2 there"):
        plan_rearrange(other, target, Rank())


@pytest.mark.parametrize("others", [(0, 1), (1, 0)])
def test_rows_padded_in_another_way_cannot_be_put_in_place(
    others: tuple[int, int],
) -> None:
    layouts = KVLayout.fused(), KVLayout.pallas(row_align_nbytes=12)
    source, target = (_Engine(layouts[which]).shape(sizes=(8, 8)) for which in others)
    with pytest.raises(IncompatiblePeer, match="a token takes") as caught:
        plan_rearrange(source, target, Rank())
    assert caught.value.field == "layout"
    padded = _Engine(layouts[1], block=64).shape(sizes=(8, 8))
    assert plan_rearrange(padded, _Engine(layouts[1]).shape(sizes=(8, 8)), Rank())
