from __future__ import annotations

import pytest

from harness.fuzzing.oracle import Finding, expect, measured, pieces_of


def test_only_what_does_not_hold_is_a_finding() -> None:
    expect(True, "never said")
    with pytest.raises(Finding, match="two and two: 5"):
        expect(False, "two and two", 5)


@pytest.mark.parametrize("nbytes", [0, 1, 2, 36, 100, 159, 1000])
def test_pieces_are_the_same_bytes_and_always_the_same_pieces(nbytes: int) -> None:
    data = bytes(n % 251 for n in range(nbytes))
    assert b"".join(pieces_of(data)) == data
    assert pieces_of(data) == pieces_of(data)


def test_some_short_inputs_are_cut_byte_by_byte() -> None:
    cut = [len(pieces_of(bytes([n] * 50))) for n in range(100)]
    assert 2 < cut.count(50) < 20
    assert min(cut) < 5


def test_memory_is_measured() -> None:
    assert measured(lambda data: None, b"") < 10_000
    assert measured(lambda data: bytearray(2**20).clear(), b"") >= 2**20
