from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeAlias

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st

from asynckv.devices.copying import CopyPool
from asynckv.parallel.copies import CopySide, Span, Step
from asynckv.parallel.plans import ReshardPlan, plan_rearrange, plan_reshard
from asynckv.parallel.shapes import CROSS_LAYER_LAYOUTS, EngineShape, KVLayout, Rank
from asynckv.tensors.blocks import KVBlocks
from asynckv.tensors.jobs import CopyJob
from asynckv.tensors.resharding import (
    Places,
    SegmentView,
    alignment_of,
    rearrange,
    rearrange_jobs,
    reshard,
    reshard_jobs,
)
from asynckv.testing.blocked import until, until_blocked
from harness.whole_cache import Numbers, WholeCache

_LAYOUTS = (
    KVLayout.kv_first("NHD"),
    KVLayout.kv_first("HND"),
    KVLayout.blocks_first("NHD"),
    KVLayout.pallas(row_align_nbytes=12),
    *(KVLayout.named(name) for name in CROSS_LAYER_LAYOUTS),
)


_Cancel: TypeAlias = Callable[[], Coroutine[Any, Any, None]]
_Begin: TypeAlias = Callable[
    [Coroutine[Any, Any, None]], tuple[asyncio.Task[None], _Cancel]
]


class _Held(CopyJob):
    """A job that does one step, and the next ones when it is told to go on."""

    def __init__(self, job: CopyJob) -> None:
        self.goes_on = threading.Event()
        self.has_begun = False
        self._job = job

    @property
    def nbytes(self) -> int:
        return self._job.nbytes

    def steps(self) -> Generator[None, None, None]:
        for _ in self._job.steps():
            self.has_begun = True
            self.goes_on.wait(10)
            yield


def _shape(
    layout: KVLayout = _LAYOUTS[0],
    *,
    tp: int = 1,
    block: int = 4,
    sizes: tuple[int, int] = (4, 4),
    stages: tuple[int, ...] = (2,),
) -> EngineShape:
    return EngineShape(
        layout=layout,
        block_size=block,
        key_nbytes=sizes[0],
        value_nbytes=sizes[1],
        num_kv_heads=4,
        tp_size=tp,
        stages=stages,
    )


def _bytes(numbers: Numbers) -> torch.Tensor:
    """Return a byte for each number, equal ones for equal ones."""
    mixed = (numbers * 2654435761 >> 7) & 0xFF
    return torch.from_numpy(numpy.where(numbers < 0, 0, mixed).astype(numpy.uint8))


def _scattered(region: torch.Tensor, seed: int, *, is_empty: bool = False) -> KVBlocks:
    """Return the same blocks at places of their own in a larger pool."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.zeros((len(region) + 3, region.shape[1]), dtype=torch.uint8)
    ids = torch.randperm(len(pool), generator=generator)[: len(region)]
    if not is_empty:
        pool[ids] = region
    return KVBlocks(pool, ids)


def _sides(
    plan: ReshardPlan, tokens: int, seed: int
) -> tuple[dict[Rank, list[KVBlocks]], list[KVBlocks], list[torch.Tensor]]:
    whole = WholeCache(plan.source, tokens)
    expected = [_bytes(region) for region in whole.regions(plan.target, plan.rank)]
    landing = [_scattered(region, seed, is_empty=True) for region in expected]
    sources = {
        rank: [
            _scattered(_bytes(region), seed + 1)
            for region in whole.regions(plan.source, rank)
        ]
        for rank in plan.source_ranks
    }
    return sources, landing, expected


@given(
    st.sampled_from(_LAYOUTS),
    st.sampled_from(_LAYOUTS),
    st.tuples(st.sampled_from((1, 2, 4, 8)), st.sampled_from((1, 2, 4, 8))),
    st.tuples(st.sampled_from((2, 4, 6)), st.sampled_from((2, 4, 8))),
    st.sampled_from(((4, 4), (8, 2), (3, 5))),
    st.integers(1, 20),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_what_lands_is_what_the_rank_holds_of_the_whole_tensor(
    layout: KVLayout,
    other: KVLayout,
    ranks: tuple[int, int],
    blocks: tuple[int, int],
    sizes: tuple[int, int],
    tokens: int,
    data: st.DataObject,
) -> None:
    source = _shape(layout, tp=ranks[0], block=blocks[0], sizes=sizes, stages=(1, 1))
    target = _shape(other, tp=ranks[1], block=blocks[1], sizes=sizes)
    rank = data.draw(st.sampled_from(list(target.ranks())))
    plan = plan_reshard(source, target, rank)
    sources, landing, expected = _sides(plan, tokens, seed=tokens)
    for read in plan.reads:
        reshard(read.copies, sources[read.source], landing, Span(tokens))
    for came, should in zip(landing, expected, strict=True):
        assert torch.equal(came.pool[came.block_ids], should)
        elsewhere = numpy.setdiff1d(range(len(came.pool)), came.block_ids)
        assert not came.pool[elsewhere].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2, torch.float64])
def test_any_dtype_and_any_strides_between_blocks_will_do(dtype: torch.dtype) -> None:
    size = dtype.itemsize
    shape = _shape(KVLayout.kv_first("HND"), sizes=(8 * size, 8 * size), stages=(1,))
    target = _shape(KVLayout.fused("NHD"), sizes=(8 * size, 8 * size), stages=(1,))
    cache = torch.randint(0, 255, (6, 2, 4, 4, 8 * size), dtype=torch.uint8).view(dtype)
    landing = torch.zeros((3, 4, 4, 16), dtype=dtype)
    (read,) = plan_reshard(shape, target, Rank()).reads
    ids = [5, 0, 2]
    regions = [KVBlocks(cache[:, part], ids) for part in (0, 1)]
    reshard(read.copies, regions, [landing], Span(12))
    moved = torch.cat([cache[ids, 0], cache[ids, 1]], dim=-1).transpose(1, 2)
    assert torch.equal(landing.view(torch.uint8), moved.contiguous().view(torch.uint8))


def test_what_the_target_has_from_before_is_left_alone() -> None:
    shape = _shape(sizes=(2, 2), stages=(1,))
    (read,) = plan_reshard(shape, shape, Rank()).reads
    sources = [torch.full((4, 32), fill, dtype=torch.uint8) for fill in (1, 2)]
    targets = [torch.zeros((3, 32), dtype=torch.uint8) for _ in range(2)]
    reshard(read.copies, sources, targets, Span(13, 0, 4))
    assert [{*target.flatten().tolist()} for target in targets] == [{1}, {2}]
    targets[0].zero_()
    reshard(read.copies, sources, targets, Span(13, 8, 4))
    assert targets[0][:, 0].tolist() == [0, 1, 1]


def test_a_segment_that_is_longer_than_a_piece_moves_all_the_same() -> None:
    shape = _shape(block=2**10, sizes=(2**10, 2**10), stages=(1,))
    (read,) = plan_reshard(shape, shape, Rank()).reads
    nbytes = 2**10 * 4 * 2**10
    sources = [torch.full((1, nbytes), fill, dtype=torch.uint8) for fill in (1, 2)]
    targets = [torch.zeros((1, nbytes), dtype=torch.uint8) for _ in range(2)]
    reshard(read.copies, sources, targets, Span(2**10))
    assert all(map(torch.equal, targets, sources))


async def test_a_pool_does_it_off_the_loop(pool: CopyPool) -> None:
    source = _shape(KVLayout.kv_first("NHD"), block=16, sizes=(256, 256))
    target = _shape(KVLayout.blocks_first("HND"), tp=2, block=64, sizes=(256, 256))
    plan = plan_reshard(source, target, Rank(tp=1))
    sources, landing, expected = _sides(plan, 1000, seed=7)
    (read,) = plan.reads
    jobs = reshard_jobs(read.copies, sources[read.source], landing, Span(1000))
    assert sum(job.nbytes for job in jobs) == 1008 * 2 * 2 * 2 * 256
    await pool.run(jobs)
    for came, should in zip(landing, expected, strict=True):
        assert torch.equal(came.pool[came.block_ids], should)


async def test_after_a_cancelled_run_nothing_is_written_any_more(
    pool: CopyPool, begin: _Begin
) -> None:
    shape = _shape(KVLayout.kv_first("HND"), block=16, sizes=(256, 256), stages=(1,))
    other = _shape(KVLayout.kv_first("NHD"), block=16, sizes=(256, 256), stages=(1,))
    sources = [torch.ones((2048, 16, 4, 64), dtype=torch.int32) for _ in range(2)]
    targets = [torch.zeros((2048, 16, 4, 64), dtype=torch.int32) for _ in range(2)]
    (read,) = plan_reshard(shape, other, Rank()).reads
    jobs = reshard_jobs(read.copies, sources, targets, Span(2048 * 16))
    held = [_Held(job) for job in jobs]
    task, cancel = begin(pool.run(held))
    await until(lambda: any(job.has_begun for job in held))
    cancelling = asyncio.create_task(cancel())
    await until_blocked(cancelling, task)
    for job in held:
        job.goes_on.set()
    await cancelling
    left = sum(int(target.sum()) for target in targets)
    assert 0 < left < 2 * targets[0].numel()
    assert sum(int(target.sum()) for target in targets) == left


def _one_read() -> tuple[ReshardPlan, list[torch.Tensor]]:
    shape = _shape(sizes=(2, 2), stages=(1,))
    regions = [torch.zeros((4, 4, 4, 2), dtype=torch.uint8) for _ in range(2)]
    return plan_reshard(shape, shape, Rank()), regions


def test_regions_that_the_plan_is_not_for_are_refused_before_a_byte_moves() -> None:
    plan, good = _one_read()
    copies = plan.reads[0].copies
    with pytest.raises(ValueError, match="source region 1 of 1"):
        reshard(copies, good[:1], good, Span(4))
    with pytest.raises(ValueError, match="target region 1 of 1"):
        reshard(copies, good, good[:1], Span(4))
    with pytest.raises(
        ValueError, match="source region 0 has 4 blocks, the span takes 5"
    ):
        reshard(copies, good, [region.clone() for region in good], Span(17))
    small = [torch.zeros((4, 31), dtype=torch.uint8) for _ in range(2)]
    for sources, targets in ((small, good), (good, small)):
        with pytest.raises(ValueError, match="has 31 bytes, the plan reaches to 32"):
            reshard(copies, sources, targets, Span(4))


def test_nothing_lands_in_a_block_that_is_there_twice() -> None:
    plan, good = _one_read()
    twice = [KVBlocks(region, [1, 1]) for region in good]
    with pytest.raises(ValueError, match="twice"):
        reshard(plan.reads[0].copies, good, twice, Span(8))


def test_no_tokens_move_nothing() -> None:
    plan, good = _one_read()
    jobs = reshard_jobs(plan.reads[0].copies, good, good, Span(0))
    assert [job.nbytes for job in jobs] == [0, 0]
    reshard(plan.reads[0].copies, good, good, Span(0))


_IN_PLACE = (
    KVLayout.blocks_first("NHD"),
    KVLayout.blocks_first("HND"),
    KVLayout.fused("NHD"),
    KVLayout.fused("HND"),
)
_KV_FIRST = (KVLayout.kv_first("NHD"), KVLayout.kv_first("HND"))
_ACROSS_LAYERS = tuple(map(KVLayout.named, ("BLHNC", "BLNHC", "BHLNC")))
_HEADS_APART = (KVLayout.named("LHBNC"),)


def _other_shape(
    layout: KVLayout, block: int = 4, tp: int = 2, sizes: tuple[int, int] = (4, 4)
) -> EngineShape:
    return EngineShape(
        layout=layout,
        block_size=block,
        key_nbytes=sizes[0],
        value_nbytes=sizes[1],
        num_kv_heads=4,
        tp_size=tp,
        stages=(2,),
    )


def _mixed(numbers: Numbers) -> torch.Tensor:
    return torch.from_numpy((numbers * 2654435761 >> 7).astype(numpy.uint8))


def _received(
    source: EngineShape, target: EngineShape, tokens: int
) -> tuple[list[KVBlocks], list[torch.Tensor]]:
    """Return blocks that hold the source's bytes, and what they should hold."""
    whole, rank = WholeCache(target, tokens), Rank(tp=1)
    should = [_mixed(region) for region in whole.regions(target, rank)]
    landed = []
    for raw, region in zip(whole.regions(source, rank), should, strict=True):
        pool = torch.zeros((len(region) + 2, region.shape[1]), dtype=torch.uint8)
        ids = torch.randperm(len(pool))[: len(region)]
        pool[ids] = _mixed(raw).reshape(region.shape)
        landed.append(KVBlocks(pool, ids))
    return landed, should


@given(
    st.sampled_from([_IN_PLACE, _KV_FIRST, _ACROSS_LAYERS, _HEADS_APART]),
    st.tuples(st.sampled_from((2, 4, 8)), st.sampled_from((2, 4, 6))),
    st.sampled_from(((4, 4), (3, 2))),
    st.integers(1, 3),
    st.data(),
)
@settings(max_examples=50, deadline=None)
def test_received_blocks_become_the_targets_where_they_are(
    layouts: tuple[KVLayout, ...],
    blocks: tuple[int, int],
    sizes: tuple[int, int],
    groups: int,
    data: st.DataObject,
) -> None:
    layout, other = (data.draw(st.sampled_from(layouts)) for _ in range(2))
    source = _other_shape(layout, blocks[0], sizes=sizes)
    target = _other_shape(other, blocks[1], sizes=sizes)
    landed, should = _received(source, target, 24 * groups)
    copies = plan_rearrange(
        _other_shape(layout, blocks[0], 1, sizes), target, Rank(tp=1)
    )
    rearrange(copies, landed)
    for region, expected in zip(landed, should, strict=True):
        assert torch.equal(region.pool[region.block_ids], expected)
        rest = numpy.setdiff1d(range(len(region.pool)), region.block_ids)
        assert not region.pool[rest].any()


async def test_a_pool_rearranges_off_the_loop(pool: CopyPool) -> None:
    source = _other_shape(_IN_PLACE[0], 16, sizes=(256, 256))
    target = _other_shape(_IN_PLACE[1], 64, sizes=(256, 256))
    landed, should = _received(source, target, 64 * 40)
    jobs = rearrange_jobs(plan_rearrange(source, target, Rank(tp=1)), landed)
    assert sum(job.nbytes for job in jobs) == sum(region.nbytes for region in should)
    await pool.run(jobs)
    for region, expected in zip(landed, should, strict=True):
        assert torch.equal(region.pool[region.block_ids], expected)


def test_what_cannot_be_received_in_place_is_refused() -> None:
    def blocks(count: int, regions: int = 2) -> list[KVBlocks]:
        pools = [torch.zeros((8, 2 * 2 * 4 * 4), dtype=torch.uint8)] * regions
        return [KVBlocks(pool, range(count)) for pool in pools]

    target = _other_shape(_IN_PLACE[0])
    apart = plan_rearrange(_other_shape(_KV_FIRST[0]), target, Rank(tp=1))
    with pytest.raises(ValueError, match="cannot be received in another"):
        rearrange_jobs(apart, blocks(4))
    copies = plan_rearrange(_other_shape(_IN_PLACE[1], 8), target, Rank(tp=1))
    with pytest.raises(ValueError, match="3 blocks of 4 tokens are no whole number"):
        rearrange_jobs(copies, blocks(3))
    with pytest.raises(ValueError, match="is for 2 regions, not 3"):
        rearrange_jobs(copies, blocks(4, 3))
    with pytest.raises(ValueError, match="the plan reaches to"):
        rearrange_jobs(
            plan_rearrange(
                _other_shape(_IN_PLACE[1], 8), _other_shape(_IN_PLACE[0], tp=1), Rank()
            ),
            blocks(4),
        )


def test_a_block_that_is_there_twice_is_refused() -> None:
    target = _other_shape(_IN_PLACE[0])
    region = KVBlocks(torch.zeros((8, 64), dtype=torch.uint8), [1, 1])
    copies = plan_rearrange(_other_shape(_IN_PLACE[1]), target, Rank(tp=1))
    with pytest.raises(ValueError, match="twice"):
        rearrange(copies, [region, region])


def test_no_blocks_are_no_work() -> None:
    target = _other_shape(_IN_PLACE[0])
    region = KVBlocks(torch.zeros((8, 64), dtype=torch.uint8), [])
    rearrange(
        plan_rearrange(_other_shape(_IN_PLACE[1]), target, Rank(tp=1)), [region] * 2
    )


# Blocks of 8 bytes: two segments, each two pieces of one byte.
_SIDE = CopySide(0, 1, 2, 4, (Step(0, 2),))


def _places(*places: tuple[int, int]) -> Places:
    blocks, within = zip(*places, strict=True)
    return numpy.array(blocks), numpy.array(within)


def test_segments_are_the_bytes_that_strides_lead_to() -> None:
    pool = torch.arange(32, dtype=torch.uint8).view(4, 8)
    view = SegmentView(KVBlocks(pool, [3, 1]), _SIDE, (2,), 1, 1)
    taken = view.take(_places((0, 0), (0, 1), (1, 1)))
    assert taken.flatten().tolist() == [25, 27, 29, 31, 13, 15]
    view.put(_places((1, 0)), torch.zeros((1, 2, 1), dtype=torch.uint8))
    assert pool[1].tolist() == [8, 0, 10, 0, 12, 13, 14, 15]


def test_neighbours_are_taken_as_they_lie() -> None:
    pool = torch.arange(8).view(4, 2)
    side = CopySide(0, 8, 1, 16, ())
    view = SegmentView(KVBlocks(pool, [0, 2, 3]), side, (), 8, 8)
    taken = view.take(_places((1, 0), (2, 0)))
    assert taken.flatten().tolist() == [5, 7]
    assert taken.data_ptr() == pool[2, 1].data_ptr()
    view.put(_places((1, 0), (2, 0)), torch.zeros((2, 1), dtype=torch.int64))
    assert pool.tolist() == [[0, 1], [2, 3], [4, 0], [6, 0]]


@pytest.mark.parametrize(
    ("pool", "side", "nbytes"),
    [
        (torch.zeros(4, 16), CopySide(0, 0, 1, 64, ()), 8),
        (torch.zeros(4, 17), CopySide(0, 0, 1, 68, ()), 4),
        (torch.zeros(4, 32)[:, 1:17], CopySide(0, 0, 1, 64, ()), 4),
        (torch.zeros(4, 16), CopySide(0, 6, 1, 64, ()), 2),
        (torch.zeros(4, 16), CopySide(0, 0, 1, 64, (Step(0, 3),)), 1),
    ],
)
def test_units_are_as_large_as_all_places_allow(
    pool: torch.Tensor, side: CopySide, nbytes: int
) -> None:
    assert alignment_of(KVBlocks(pool, [0]), side) == nbytes
