from __future__ import annotations

from hypothesis import given, strategies as st

from asynckv.transports.lane_sockets import rest_of, vectors_of

_SIZES = st.lists(st.sampled_from([0, 1, 4096, 65536, 262144, 2**20]), max_size=1500)


@given(_SIZES)
def test_vectors_are_the_pieces_in_order(sizes: list[int]) -> None:
    pieces = [memoryview(bytes(nbytes)) for nbytes in sizes]
    found = [len(piece) for vector in vectors_of(pieces) for piece in vector]
    assert found == sizes or not any(sizes[len(found) :])


def test_small_pieces_go_together_and_large_ones_alone() -> None:
    small, large = memoryview(bytes(4096)), memoryview(bytes(2**21))
    vectors = list(vectors_of([small] * 130 + [large] * 2))
    assert [len(vector) for vector in vectors] == [64, 64, 3, 1]
    assert [len(vector) for vector in vectors_of([small[:1]] * 600)] == [512, 88]


@given(st.lists(st.integers(0, 5)), st.data())
def test_the_rest_is_what_has_not_moved(sizes: list[int], data: st.DataObject) -> None:
    pieces = [memoryview(bytes([number] * n)) for number, n in enumerate(sizes)]
    moved = data.draw(st.integers(0, sum(sizes)))
    rest = rest_of(pieces, moved)
    assert b"".join(rest) == b"".join(pieces)[moved:]
    assert bool(rest) == (moved < sum(sizes))
