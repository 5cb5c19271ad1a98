from __future__ import annotations

import numpy
import pytest
from hypothesis import given, strategies as st

from asynckv.tensors.runs import SmallBlocks

_BASE = bytes(range(240))


def _blocks(base: bytes | bytearray, numbers: list[int], nbytes: int) -> SmallBlocks:
    starts = numpy.array(numbers, dtype=numpy.int64) * nbytes
    return SmallBlocks(memoryview(base), starts, nbytes)


def _expected(numbers: list[int], nbytes: int) -> bytes:
    return b"".join(_BASE[n * nbytes : (n + 1) * nbytes] for n in numbers)


@given(st.lists(st.integers(0, 19), max_size=9), st.integers(1, 12), st.data())
def test_any_part_of_blocks_is_taken(
    numbers: list[int], nbytes: int, data: st.DataObject
) -> None:
    expected = _expected(numbers, nbytes)
    start = data.draw(st.integers(0, len(expected)))
    stop = data.draw(st.integers(start, len(expected)))
    target = bytearray(stop - start)
    _blocks(_BASE, numbers, nbytes).take(start, memoryview(target))
    assert target == expected[start:stop]


@given(st.permutations(range(20)), st.integers(1, 12), st.integers(1, 240))
def test_what_is_put_in_pieces_lies_in_its_blocks(
    numbers: list[int], nbytes: int, piece_nbytes: int
) -> None:
    expected = _expected(numbers, nbytes)
    base = bytearray(20 * nbytes)
    blocks = _blocks(base, numbers, nbytes)
    for start in range(0, len(expected), piece_nbytes):
        blocks.put(start, memoryview(expected[start : start + piece_nbytes]))
    assert base == _BASE[: 20 * nbytes]


def test_nothing_beside_the_blocks_is_written() -> None:
    base = bytearray(40)
    _blocks(base, [3, 1], 8).put(4, memoryview(b"x" * 8))
    assert base == bytes(8) + b"x" * 4 + bytes(16) + b"x" * 4 + bytes(8)


def test_what_can_only_be_read_is_not_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        _blocks(_BASE, [3, 1], 8).put(0, memoryview(b"x" * 16))
