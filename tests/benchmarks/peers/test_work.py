from __future__ import annotations

import numpy
import pytest

from benchmarks.peers.work import QUICK, WORKS, Piece, Pool, Work, WrongBytes

BLOCKS = Work("blocks", "ten blocks", 10, 8, 16)
LAYERS = Work("layers", "two layers", 2, 64, 64)


@pytest.fixture
def source() -> Pool:
    return Pool.source([BLOCKS, LAYERS])


@pytest.fixture
def target() -> Pool:
    return Pool.target([BLOCKS, LAYERS])


def sizes(pieces: list[Piece]) -> list[int]:
    return [piece.nbytes for piece in pieces]


def test_a_request_says_which_bytes_are_meant() -> None:
    decoded = Work.decode(BLOCKS.encode())
    assert (decoded.parts, decoded.nbytes, decoded.stride) == (10, 8, 16)


def test_small_parts_are_joined_and_large_ones_cut(source: Pool) -> None:
    assert sizes(list(source.pieces(BLOCKS, 32))) == [32, 32, 16]
    assert sizes(list(source.pieces(LAYERS, 48))) == [48, 16, 48, 16]


@pytest.mark.parametrize("work", [BLOCKS, LAYERS])
@pytest.mark.parametrize("most", [8, 24, 64, 1000])
def test_what_is_gathered_scatters_into_its_places(
    source: Pool, target: Pool, work: Work, most: int
) -> None:
    pairs = zip(source.pieces(work, most), target.pieces(work, most), strict=True)
    for sent, landed in pairs:
        landed.scatter(sent.gather().data)
    target.check(work, source)


@pytest.mark.parametrize("work", [BLOCKS, LAYERS])
def test_what_lands_elsewhere_is_put_into_its_places(
    source: Pool, target: Pool, work: Work
) -> None:
    pairs = zip(source.pieces(work, 64), target.pieces(work, 64), strict=True)
    for sent, piece in pairs:
        landing = piece.landing()
        landing[:] = sent.gather()
        piece.land(landing)
    target.check(work, source)


def test_a_layer_lands_where_it_belongs_at_once(target: Pool) -> None:
    piece = next(target.pieces(LAYERS, 64))
    assert numpy.shares_memory(piece.landing(), target.array)


def test_one_wrong_byte_is_found(source: Pool, target: Pool) -> None:
    target.array[:] = source.array
    target.array[16 * 9 + 7] ^= 1
    with pytest.raises(WrongBytes, match="part 9"):
        target.check(BLOCKS, source)


def test_bytes_between_the_parts_are_nobody_s(source: Pool, target: Pool) -> None:
    target.array[:] = source.array
    target.array[16 * 9 + 8] ^= 1
    target.check(BLOCKS, source)


def test_poison_is_no_part_of_any_work(source: Pool, target: Pool) -> None:
    with pytest.raises(WrongBytes, match="part 0"):
        target.check(LAYERS, source)


def test_every_work_has_a_quick_one_of_the_same_name() -> None:
    assert [work.name for work in WORKS] == [work.name for work in QUICK]
