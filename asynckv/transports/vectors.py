"""Small pieces of memory that one system call moves together. Plain functions.

Large ones go alone: a call that moves many of those keeps others waiting, and saves
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

__all__ = ("rest_of", "vectors_of")

_FULL_NBYTES: Final = 256 * 1024
_MOST_PIECES: Final = 512
"""The kernel takes 1,024."""


def vectors_of(pieces: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Yield the pieces in order, as many together as one call should move."""
    vector: list[memoryview] = []
    nbytes = 0
    for piece in pieces:
        vector.append(piece)
        nbytes += len(piece)
        if nbytes >= _FULL_NBYTES or len(vector) == _MOST_PIECES:
            yield vector
            vector, nbytes = [], 0
    if nbytes:
        yield vector


def rest_of(vector: Sequence[memoryview], moved: int) -> Sequence[memoryview]:
    """Return what is left of it when so many bytes have moved."""
    for index, piece in enumerate(vector):
        if moved < len(piece):
            return [piece[moved:], *vector[index + 1 :]]
        moved -= len(piece)
    return ()
