from __future__ import annotations

import pytest

from asynckv.parallel.copies import (
    CopySide,
    Held,
    Move,
    Place,
    Span,
    Step,
    StridedCopy,
    copies_between,
    places_of,
    region_block_nbytes,
    region_count,
)
from asynckv.parallel.shapes import EngineShape, KVLayout

# Two heads of 4 bytes; blocks of 2 tokens go into blocks of 4.
_COPY = StridedCopy(
    segment_tokens=2,
    nbytes=4,
    counts=(2,),
    source=CopySide(0, 0, 1, 8, (Step(1, 0),)),
    target=CopySide(3, 1, 2, 8, (Step(0, 16),)),
)


def test_each_segment_moves_in_the_same_strides() -> None:
    assert list(_COPY.moves(Span(3))) == [
        Move(Place(0, 0, 0), Place(3, 0, 1), 4),
        Move(Place(1, 0, 0), Place(3, 0, 17), 4),
        Move(Place(0, 1, 0), Place(3, 0, 9), 4),
        Move(Place(1, 1, 0), Place(3, 0, 25), 4),
    ]
    assert _COPY.segment_nbytes == 8


@pytest.mark.parametrize(
    ("span", "segments"),
    [
        (Span(0), range(0)),
        (Span(1), range(1)),
        (Span(5), range(3)),
        (Span(9, 4, 4), range(2, 5)),
        (Span(9, 6, 4), range(3, 5)),
        (Span(9, 2, 8), range(4, 5)),
        (Span(3, 4, 4), range(2, 2)),
    ],
)
def test_what_is_in_blocks_of_both_sides_moves(span: Span, segments: range) -> None:
    assert list(_COPY.segments_of(span)) == list(segments)


def test_blocks_are_counted_from_where_each_side_begins() -> None:
    move = next(_COPY.moves(Span(9, 2, 4)))
    assert (move.source.block, move.target.block) == (1, 0)


@pytest.mark.parametrize("span", [Span(9, 1, 0), Span(9, 0, 2), Span(9, -2, 0)])
def test_a_side_begins_with_a_block(span: Span) -> None:
    with pytest.raises(ValueError, match="begins no block"):
        _COPY.segments_of(span)


def test_a_copy_between_regions_is_one_for_each_pair() -> None:
    pairs = list(_COPY.between_regions())
    assert _COPY.region_pairs == len(pairs) == 2
    moves = [move for pair in pairs for move in pair.moves(Span(9, 2, 4))]
    assert sorted(moves) == sorted(_COPY.moves(Span(9, 2, 4)))
    assert list(_COPY.between_regions(1, 2)) == pairs[1:]
    assert all(pair.region_pairs == 1 for pair in pairs)


def _shape(layout: KVLayout) -> EngineShape:
    return EngineShape(
        layout=layout,
        block_size=16,
        key_nbytes=3,
        value_nbytes=0 if layout.is_mla else 2,
        num_kv_heads=1 if layout.is_mla else 4,
    )


@pytest.mark.parametrize(
    ("layout", "blocks"),
    [
        (KVLayout.kv_first("HND"), (192, 128) * 3),
        (KVLayout("KLBNH"), (192,) * 3 + (128,) * 3),
        (KVLayout.blocks_first("NHD"), (320,) * 3),
        (KVLayout.fused("NHD"), (320,) * 3),
        (KVLayout.pallas(8), (1024,) * 3),
        (KVLayout.named("LHBNC"), (80,) * 12),
        (KVLayout.named("BLHNC"), (960,)),
        (KVLayout.mla(), (48,) * 3),
    ],
)
def test_regions_are_what_stands_before_blocks(
    layout: KVLayout, blocks: tuple[int, ...]
) -> None:
    assert region_block_nbytes(_shape(layout), 3) == blocks
    assert region_count(_shape(layout), 3) == len(blocks)


def test_keys_and_values_have_strides_of_their_own() -> None:
    keys, values = places_of(_shape(KVLayout.blocks_first("HND")), 2)
    assert (keys.region, keys.offset, keys.nbytes) == (0, 0, 3)
    assert (values.region, values.offset, values.nbytes) == (0, 192, 2)
    assert keys.steps == {"L": Step(1, 0), "H": Step(0, 48), "N": Step(0, 3)}
    assert values.steps == {"L": Step(1, 0), "H": Step(0, 32), "N": Step(0, 2)}


def test_keys_and_values_apart_are_a_region_each() -> None:
    keys, values = places_of(_shape(KVLayout.kv_first()), 2)
    assert (keys.region, keys.offset, keys.block_nbytes) == (0, 0, 192)
    assert (values.region, values.offset, values.block_nbytes) == (1, 0, 128)
    assert keys.steps["L"] == values.steps["L"] == Step(2, 0)


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
