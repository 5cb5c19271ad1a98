"""A region is to a tier what it is to everybody: the same bytes, in order."""

from __future__ import annotations

import pytest

from asynckv.stores.memory import tier_memory
from asynckv.tensors.arena import HeapArena


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 300_000])
def test_what_is_written_by_pieces_is_in_the_region(nbytes: int) -> None:
    (region,) = HeapArena(2**20).allocate_outside([nbytes])
    memory, data = tier_memory(region), bytes(range(256)) * 1200
    start = 0
    for piece in memory.pieces:
        piece[:] = data[start : start + len(piece)]
        start += len(piece)
    assert start == memory.nbytes == nbytes
    assert bytes(region.read() or b"") == data[:nbytes]
