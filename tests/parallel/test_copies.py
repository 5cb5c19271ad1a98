from __future__ import annotations

import pytest

from asynckv.parallel.copies import CopySide, Move, Place, Span, Step, StridedCopy

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
