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
from asynckv.parallel.copies import Span
from asynckv.parallel.plans import ReshardPlan, plan_reshard
from asynckv.parallel.shapes import CROSS_LAYER_LAYOUTS, EngineShape, KVLayout, Rank
from asynckv.tensors.blocks import KVBlocks
from asynckv.tensors.jobs import CopyJob
from asynckv.tensors.resharding import reshard, reshard_jobs
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
