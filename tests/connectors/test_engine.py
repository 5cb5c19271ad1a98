from __future__ import annotations

import msgspec
import pytest

from asynckv.connectors.engine import KVEngine
from asynckv.errors import IncompatiblePeer
from asynckv.parallel.shapes import KVLayout, Rank
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import toy_shape

MODEL = ToyModel(heads=4)


def engine_of(tp_size: int, rank: int = 0) -> KVEngine:
    shape = toy_shape(MODEL, tp_size=tp_size)
    return KVEngine(
        engine_id="e", block_size=16, rank=rank, tp_size=tp_size, shape=shape
    )


def test_a_rank_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 2 of 2"):
        KVEngine(engine_id="e", block_size=16, rank=2, tp_size=2)
    with pytest.raises(ValueError, match="block_size"):
        KVEngine(engine_id="e", block_size=0)


def test_a_shape_of_another_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="the shape is of"):
        KVEngine(engine_id="e", block_size=32, shape=toy_shape(MODEL))


def test_a_prompt_takes_whole_blocks() -> None:
    engine = engine_of(1)
    assert [engine.blocks_of(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert engine_of(2, 1).place == Rank(0, 1)


def test_readers_and_sources_agree() -> None:
    prefill, decode = engine_of(1), engine_of(2, 1)
    assert prefill.readers_in(toy_shape(MODEL, tp_size=2)) == (0, 1)
    assert tuple(decode.reads_from(prefill.shape)) == (0,)
    assert tuple(engine_of(1).reads_from(decode.shape)) == (0, 1)


def test_of_replicated_heads_some_ranks_have_no_reader() -> None:
    eight = [engine_of(8, rank) for rank in range(8)]
    readers = [one.readers_in(toy_shape(MODEL, tp_size=4)) for one in eight]
    assert sorted(readers) == [(), (), (), (), (0,), (1,), (2,), (3,)]


def test_without_a_shape_ranks_read_from_their_like() -> None:
    plain = KVEngine(engine_id="e", block_size=16, rank=1, tp_size=2)
    assert plain.reads_from(None) == {1: None}
    assert plain.readers_in(plain.shape_over(2)) == (1,)
    with pytest.raises(IncompatiblePeer) as caught:
        plain.reads_from(toy_shape(MODEL))
    assert caught.value.field == "layout"


def stages_of(*stages: int, rank: int = 0) -> KVEngine:
    shape = msgspec.structs.replace(toy_shape(MODEL), stages=stages)
    return KVEngine(engine_id="e", block_size=16, rank=rank, shape=shape)


def test_ranks_of_stages_are_divided_by_their_number() -> None:
    for rank in (0, 1):
        engine = stages_of(2, 2, rank=rank)
        assert engine.readers_in(engine.shape_over(2)) == (rank,)
        assert engine.readers_in(engine.shape_over(4)) == (2 * rank, 2 * rank + 1)
        assert engine.readers_in(engine.shape_over(pp_size=1)) == (0,)
    whole = stages_of(4)
    for shape in (whole.shape_over(2, tp_size=1), whole.shape_over(pp_size=2)):
        assert whole.readers_in(shape) == (0, 1)


def test_ranks_that_do_not_make_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="3 ranks are not 2 stages"):
        stages_of(2, 2).shape_over(3)
    with pytest.raises(ValueError, match="5 stages"):
        stages_of(2, 2).shape_over(pp_size=5)


def test_a_block_may_be_of_one_token() -> None:
    assert KVEngine(engine_id="e", block_size=1).blocks_of(3) == 3


def test_layers_of_a_read_are_those_of_its_stage_or_all_that_lie_together() -> None:
    second = stages_of(2, 2, rank=1)
    (read,) = second.reads_from(second.shape).values()
    assert second.layers_of(read, ("c", "d")) == ("c", "d")
    (whole,) = second.reads_from(stages_of(4).shape).values()
    assert second.layers_of(whole, ("c", "d")) == ("c", "d")
    shape = toy_shape(MODEL, layout=KVLayout.named("BLHNC"))
    together = KVEngine(engine_id="e", block_size=16, shape=shape)
    (read,) = together.reads_from(shape).values()
    assert together.layers_of(read, ("layers",)) == ("layers",)
