from __future__ import annotations

import msgspec
import pytest

from asynckv.errors import IncompatiblePeer
from asynckv.parallel.plans import plan_reshard
from asynckv.parallel.shapes import EngineShape, KVLayout, Rank
from asynckv.parallel.topology import TransferTopology


def _shape(
    tp: int = 1, heads: int = 8, block: int = 16, stages: tuple[int, ...] = (4,)
) -> EngineShape:
    return EngineShape(
        layout=KVLayout.kv_first(),
        block_size=block,
        key_nbytes=256,
        num_kv_heads=heads,
        tp_size=tp,
        stages=stages,
    )


def _topology(
    tp: int, rank: int, remote: EngineShape, heads: int = 8, block: int = 16
) -> TransferTopology:
    topology = TransferTopology("decode", _shape(tp, heads, block), Rank(tp=rank))
    topology.register_remote_engine("prefill", remote)
    return topology


def test_every_member_of_the_original_is_there() -> None:
    topology = _topology(4, 3, _shape(2, block=64))
    assert (topology.engine_id, topology.tp_rank, topology.tp_size) == ("decode", 3, 4)
    assert topology.remote_tp_size == {"decode": 4, "prefill": 2}
    assert topology.remote_block_size == {"decode": 16, "prefill": 64}
    assert (topology.is_mla, topology.total_num_kv_heads) == (False, 8)
    assert (topology.split_k_and_v, topology.is_kv_layout_blocks_first) == (True, False)
    assert topology.block_size == 16
    assert topology.tp_ratio_from_engine_id("prefill") == topology.tp_ratio(2) == 2
    assert topology.block_size_ratio_from_engine_id("prefill") == -4
    assert topology.block_size_ratio(8) == 2
    assert topology.get_target_remote_rank(2) == 1
    assert topology.get_target_remote_rank_from_engine_id("prefill") == 1
    assert not topology.is_kv_replicated("prefill")
    assert not topology.replicates_kv_cache("prefill")


@pytest.mark.parametrize(
    ("tp", "remote_tp", "ratio"), [(8, 2, 4), (2, 8, -4), (2, 2, 1)]
)
def test_ratios_go_both_ways(tp: int, remote_tp: int, ratio: int) -> None:
    assert _topology(tp, 0, _shape()).tp_ratio(remote_tp) == ratio
    blocks = _topology(1, 0, _shape(), block=16 * tp).block_size_ratio(16 * remote_tp)
    assert blocks == ratio


def test_sizes_without_a_whole_ratio_are_named() -> None:
    topology = _topology(2, 0, _shape(3, heads=12), heads=12)
    with pytest.raises(ValueError, match="tp_size is 2 here and 3 there"):
        topology.tp_ratio_from_engine_id("prefill")
    with pytest.raises(ValueError, match="block_size is 16 here and 24 there"):
        topology.block_size_ratio(24)
    with pytest.raises(ValueError, match="tp_size is 2 here and 0 there"):
        topology.tp_ratio(0)


def test_ranks_are_found_also_where_there_is_no_whole_ratio() -> None:
    remote = _shape(3, heads=12)
    for rank, ranks in ((0, [0, 1]), (1, [1, 2])):
        assert _topology(2, rank, remote, heads=12).target_remote_ranks(3) == ranks


@pytest.mark.parametrize("rank", range(8))
def test_a_rank_of_many_reads_from_the_one_that_the_original_reads_from(
    rank: int,
) -> None:
    for heads in (1, 2, 4, 8, 16):
        for remote_tp in (1, 2, 4, 8):
            topology = _topology(8, rank, _shape(heads=heads), heads=heads)
            assert topology.get_target_remote_rank(remote_tp) == rank // (
                8 // remote_tp
            )


def test_a_rank_of_few_reads_from_several() -> None:
    topology = _topology(2, 1, _shape(8))
    assert topology.target_remote_ranks(8) == [4, 5, 6, 7]
    with pytest.raises(ValueError, match="reads from 4 of 8: target_remote_ranks"):
        topology.get_target_remote_rank_from_engine_id("prefill")


def test_a_head_that_several_ranks_hold_is_read_once() -> None:
    topology = _topology(2, 1, _shape(8, heads=4), heads=4)
    assert topology.target_remote_ranks(8) == [4, 6]
    read = [list(read.heads) for read in topology.plan_from("prefill").reads]
    assert read == [[2], [3]]


@pytest.mark.parametrize(("tp", "is_replicated"), [(4, False), (8, False), (16, True)])
def test_as_many_ranks_as_heads_are_no_replicas(tp: int, is_replicated: bool) -> None:
    topology = _topology(tp, 0, _shape())
    assert topology.is_kv_replicated("decode") is is_replicated
    assert topology.replicates_kv_cache("decode") is is_replicated


def test_latents_are_replicated_whatever_the_number_of_ranks() -> None:
    shape = EngineShape(layout=KVLayout.mla(), block_size=64, key_nbytes=1152)
    topology = TransferTopology("decode", shape)
    assert topology.replicates_kv_cache("decode")
    assert not topology.is_kv_replicated("decode")


def test_a_handshake_is_with_the_ranks_of_all_stages_that_are_read_from() -> None:
    topology = _topology(2, 1, _shape(4, stages=(2, 2)))
    ranks = topology.handshake_target_ranks("prefill")
    assert ranks == (Rank(0, 2), Rank(0, 3), Rank(1, 2), Rank(1, 3))
    assert topology.plan_from("prefill").source_ranks == ranks


def test_readers_are_those_whose_plans_read_from_this_rank() -> None:
    topology = _topology(1, 0, _shape(2, stages=(1, 3)))
    readers = topology.reader_ranks("prefill")
    assert readers == (Rank(0, 0), Rank(0, 1), Rank(1, 0), Rank(1, 1))
    for reader in readers:
        plan = plan_reshard(topology.shape, topology.shape_of("prefill"), reader)
        assert plan.source_ranks == (Rank(),)


def test_engines_come_and_go() -> None:
    topology = _topology(1, 0, _shape(2))
    topology.register_remote_engine("prefill", _shape(2))
    assert topology.remote_engines == ("prefill",)
    with pytest.raises(ValueError, match="another shape"):
        topology.register_remote_engine("prefill", _shape(4))
    topology.unregister_remote_engine("prefill")
    topology.unregister_remote_engine("prefill")
    with pytest.raises(KeyError, match="'prefill' is not registered"):
        topology.shape_of("prefill")
    topology.register_remote_engine("prefill", _shape(4))
    assert topology.shape_of("prefill").tp_size == 4


def test_the_local_engine_stays() -> None:
    with pytest.raises(ValueError, match="the local engine"):
        _topology(1, 0, _shape()).unregister_remote_engine("decode")


def test_another_model_is_refused_when_it_is_registered() -> None:
    topology = _topology(1, 0, _shape())
    with pytest.raises(IncompatiblePeer, match="num_kv_heads is 8 here and 4 there"):
        topology.register_remote_engine("other", _shape(heads=4))
    assert topology.remote_engines == ("prefill",)


def test_a_rank_that_is_not_there_has_no_topology() -> None:
    for rank in (Rank(tp=2), Rank(pp=1)):
        with pytest.raises(ValueError, match="there is no"):
            TransferTopology("decode", _shape(2), rank)


def test_an_engine_is_one_line_in_a_log() -> None:
    shape = msgspec.structs.replace(_shape(2), stages=(2, 2))
    assert TransferTopology("decode", shape).describe("decode") == (
        "decode: tp 2, pp 2, 4 layers, 4 of 8 heads a rank, blocks of 16 tokens, LKBNH"
    )
