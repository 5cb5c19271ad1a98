from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st

from asynckv.devices.copying import CopyPool
from asynckv.parallel.plans import plan_rearrange
from asynckv.parallel.shapes import EngineShape, KVLayout, Rank
from asynckv.tensors.blocks import KVBlocks
from asynckv.tensors.resharding import rearrange, rearrange_jobs
from harness.whole_cache import Numbers, WholeCache

_LAYOUTS = (
    KVLayout.blocks_first("NHD"),
    KVLayout.blocks_first("HND"),
    KVLayout.fused("NHD"),
    KVLayout.fused("HND"),
)
_KV_FIRST = (KVLayout.kv_first("NHD"), KVLayout.kv_first("HND"))
_ACROSS_LAYERS = tuple(map(KVLayout.named, ("BLHNC", "BLNHC", "BHLNC")))
_HEADS_APART = (KVLayout.named("LHBNC"),)


def _shape(
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


def _bytes(numbers: Numbers) -> torch.Tensor:
    return torch.from_numpy((numbers * 2654435761 >> 7).astype(numpy.uint8))


def _received(
    source: EngineShape, target: EngineShape, tokens: int
) -> tuple[list[KVBlocks], list[torch.Tensor]]:
    """Return blocks that hold the source's bytes, and what they should hold."""
    whole, rank = WholeCache(target, tokens), Rank(tp=1)
    should = [_bytes(region) for region in whole.regions(target, rank)]
    landed = []
    for raw, region in zip(whole.regions(source, rank), should, strict=True):
        pool = torch.zeros((len(region) + 2, region.shape[1]), dtype=torch.uint8)
        ids = torch.randperm(len(pool))[: len(region)]
        pool[ids] = _bytes(raw).reshape(region.shape)
        landed.append(KVBlocks(pool, ids))
    return landed, should


@given(
    st.sampled_from([_LAYOUTS, _KV_FIRST, _ACROSS_LAYERS, _HEADS_APART]),
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
    source = _shape(layout, blocks[0], sizes=sizes)
    target = _shape(other, blocks[1], sizes=sizes)
    landed, should = _received(source, target, 24 * groups)
    copies = plan_rearrange(_shape(layout, blocks[0], 1, sizes), target, Rank(tp=1))
    rearrange(copies, landed)
    for region, expected in zip(landed, should, strict=True):
        assert torch.equal(region.pool[region.block_ids], expected)
        rest = numpy.setdiff1d(range(len(region.pool)), region.block_ids)
        assert not region.pool[rest].any()


async def test_a_pool_does_it_off_the_loop(pool: CopyPool) -> None:
    source = _shape(_LAYOUTS[0], 16, sizes=(256, 256))
    target = _shape(_LAYOUTS[1], 64, sizes=(256, 256))
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

    target = _shape(_LAYOUTS[0])
    apart = plan_rearrange(_shape(_KV_FIRST[0]), target, Rank(tp=1))
    with pytest.raises(ValueError, match="cannot be received in another"):
        rearrange_jobs(apart, blocks(4))
    copies = plan_rearrange(_shape(_LAYOUTS[1], 8), target, Rank(tp=1))
    with pytest.raises(ValueError, match="3 blocks of 4 tokens are no whole number"):
        rearrange_jobs(copies, blocks(3))
    with pytest.raises(ValueError, match="is for 2 regions, not 3"):
        rearrange_jobs(copies, blocks(4, 3))
    with pytest.raises(ValueError, match="the plan reaches to"):
        rearrange_jobs(
            plan_rearrange(_shape(_LAYOUTS[1], 8), _shape(_LAYOUTS[0], tp=1), Rank()),
            blocks(4),
        )


def test_a_block_that_is_there_twice_is_refused() -> None:
    target = _shape(_LAYOUTS[0])
    region = KVBlocks(torch.zeros((8, 64), dtype=torch.uint8), [1, 1])
    copies = plan_rearrange(_shape(_LAYOUTS[1]), target, Rank(tp=1))
    with pytest.raises(ValueError, match="twice"):
        rearrange(copies, [region, region])


def test_no_blocks_are_no_work() -> None:
    target = _shape(_LAYOUTS[0])
    region = KVBlocks(torch.zeros((8, 64), dtype=torch.uint8), [])
    rearrange(plan_rearrange(_shape(_LAYOUTS[1]), target, Rank(tp=1)), [region] * 2)
