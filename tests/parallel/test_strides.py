from __future__ import annotations

import pytest

from asynckv.parallel.copies import Held, StridedCopy, copies_between
from asynckv.parallel.shapes import EngineShape, KVLayout


def _between(
    one: KVLayout, other: KVLayout, *, sizes: tuple[int, int] = (2, 2)
) -> tuple[StridedCopy, ...]:
    held = (
        Held(
            EngineShape(
                layout=layout,
                block_size=16,
                key_nbytes=sizes[0],
                value_nbytes=sizes[1],
                num_kv_heads=4,
            ),
            0,
            0,
        )
        for layout in (one, other)
    )
    return copies_between(*held, layers=1, heads=4)


@pytest.mark.parametrize(
    ("one", "other", "nbytes", "counts"),
    [
        (KVLayout.kv_first(), KVLayout.kv_first(), 128, (2,)),
        (KVLayout.blocks_first(), KVLayout.blocks_first(), 256, ()),
        (KVLayout.kv_first(), KVLayout.blocks_first(), 128, (2,)),
        (KVLayout.fused("HND"), KVLayout.fused("HND"), 256, ()),
        (KVLayout.fused("NHD"), KVLayout.pallas(), 256, ()),
        (KVLayout.fused("HND"), KVLayout.named("LHBNC"), 64, (4,)),
        (KVLayout.fused("NHD"), KVLayout.fused("HND"), 4, (4, 16)),
        (KVLayout.kv_first(), KVLayout.fused(), 2, (2, 64)),
    ],
)
def test_what_lies_together_on_both_sides_moves_together(
    one: KVLayout, other: KVLayout, nbytes: int, counts: tuple[int, ...]
) -> None:
    (copy,) = _between(one, other)
    assert (copy.nbytes, copy.counts) == (nbytes, counts)


def test_keys_and_values_of_different_sizes_are_two_copies() -> None:
    layout = KVLayout.fused()
    keys, values = _between(layout, layout, sizes=(3, 2))
    assert (keys.nbytes, values.nbytes) == (3, 2)
    assert (keys.source.offset, values.source.offset) == (0, 3)
