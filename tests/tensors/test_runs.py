from __future__ import annotations

import numpy
import pytest
from hypothesis import given, strategies as st

from asynckv.tensors.runs import (
    Memory,
    Runs,
    copied,
    fill,
    joined,
    landed,
    pieces_of,
    runs_at,
    runs_in,
)

_BASE = bytes(range(256))


def _runs(starts: list[int], nbytes: int, base: bytes | bytearray = _BASE) -> Memory:
    return runs_in(memoryview(base), numpy.array(starts, dtype=numpy.int64), nbytes)


def _expected(starts: list[int], nbytes: int) -> bytes:
    return b"".join(_BASE[start : start + nbytes] for start in starts)


@given(st.lists(st.integers(0, 240)), st.integers(0, 16), st.data())
def test_runs_are_the_bytes_at_their_places(
    starts: list[int], nbytes: int, data: st.DataObject
) -> None:
    memory, expected = _runs(starts, nbytes), _expected(starts, nbytes)
    assert memory.nbytes == len(expected)
    assert joined(memory) == expected
    start = data.draw(st.integers(0, len(expected)))
    stop = data.draw(st.integers(start, len(expected)))
    assert b"".join(pieces_of(memory, start, stop)) == expected[start:stop]


def test_neighbours_are_one_run() -> None:
    runs = _runs([8, 12, 16, 40, 0, 4], 4)
    assert isinstance(runs, Runs)
    assert len(runs) == 3
    assert [len(piece) for piece in runs.pieces(0, runs.nbytes)] == [12, 4, 8]


@pytest.mark.parametrize("starts", [[], [32], [32, 40, 48]])
def test_what_lies_in_one_place_is_a_plain_view(starts: list[int]) -> None:
    memory = _runs(starts, 8)
    assert isinstance(memory, memoryview)
    assert memory == _expected(starts, 8)


@given(st.permutations(range(16)), st.permutations(range(16)), st.integers(1, 300))
def test_runs_of_different_lengths_are_copied(
    sources: list[int], targets: list[int], piece_nbytes: int
) -> None:
    base = bytearray(16 * 6)
    source = _runs([16 * place for place in sources[:12]], 8)
    target = _runs([6 * place for place in targets], 6, base)
    hot = b"".join(copied(source, target, piece_nbytes))
    assert hot == joined(target) == joined(source)


@pytest.mark.parametrize("spans", [[], [(3, 9)], [(200, 256), (0, 1), (7, 90)]])
def test_runs_are_at_their_places(spans: list[tuple[int, int]]) -> None:
    memory = runs_at(memoryview(_BASE), spans)
    assert isinstance(memory, Runs) is (len(spans) > 1)
    assert joined(memory) == b"".join(_BASE[start:stop] for start, stop in spans)


@given(st.lists(st.binary(max_size=9)))
def test_pieces_land_one_after_the_other(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    middle, base = len(whole) // 2, bytearray(len(whole) + 5)
    target = runs_at(memoryview(base), [(middle + 5, len(base)), (0, middle)])
    hot = list(landed(map(memoryview, pieces), target))
    assert b"".join(hot) == joined(target) == whole


def test_a_few_bytes_fill_runs() -> None:
    base = bytearray(8)
    fill(_runs([4, 1], 2, base), memoryview(b"abcd"))
    assert base == b"\0cd\0ab\0\0"
    fill(_runs([0], 2, base), memoryview(b"xy"))
    assert base == b"xyd\0ab\0\0"
