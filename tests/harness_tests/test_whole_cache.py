from __future__ import annotations

from asynckv.parallel.shapes import EngineShape, KVLayout, Rank
from harness.whole_cache import NOTHING, WholeCache


def _shape(layout: KVLayout, tp: int = 1) -> EngineShape:
    return EngineShape(
        layout=layout, block_size=2, key_nbytes=1, num_kv_heads=2, tp_size=tp
    )


def test_a_rank_holds_its_heads_in_its_layout() -> None:
    # Keys are 0 to 5, values 6 to 11: two heads of three tokens.
    whole = WholeCache(_shape(KVLayout.kv_first()), 3)

    def held(layout: KVLayout, tp: int = 1) -> list[list[list[int]]]:
        shape = _shape(layout, tp)
        return [region.tolist() for region in whole.regions(shape, Rank(tp=tp - 1))]

    none = NOTHING
    assert held(KVLayout.kv_first()) == [
        [[0, 1, 2, 3], [4, 5, none, none]],
        [[6, 7, 8, 9], [10, 11, none, none]],
    ]
    assert held(KVLayout.fused("HND")) == [
        [[0, 6, 2, 8, 1, 7, 3, 9], [4, 10, none, none, 5, 11, none, none]]
    ]
    assert held(KVLayout.blocks_first(), tp=2) == [[[1, 3, 7, 9], [5, none, 11, none]]]


def test_tokens_before_the_first_are_not_there() -> None:
    shape = _shape(KVLayout.kv_first())
    keys, _ = WholeCache(shape, 3, 2).regions(shape, Rank())
    assert keys.tolist() == [[NOTHING] * 4, [4, 5, NOTHING, NOTHING]]
