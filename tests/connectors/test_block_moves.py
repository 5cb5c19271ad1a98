from __future__ import annotations

import pytest
import torch

from asynckv.connectors.block_moves import BlockMoves
from asynckv.connectors.caches import PagedCaches
from asynckv.errors import GPUFailed
from asynckv.tensors.copying import CopyPool


async def test_blocks_of_the_host_are_copied_and_nothing_is_marked() -> None:
    cache = torch.arange(32.0).view(8, 4)
    moves = BlockMoves(PagedCaches({"a": cache}, None), CopyPool())
    assert (moves.is_on_gpu, moves.mark(), moves.now()) == (False, None, None)
    found = torch.zeros(2, 4)
    await moves.gather([moves.caches.blocks("a", ((5, 1),))["a.key"]], [found], None)
    assert torch.equal(found, cache[[5, 1]])
    await moves.scatter([found], [moves.caches.blocks("a", ((0, 7),))["a.key"]], None)
    assert torch.equal(cache[[0, 7]], found)


async def test_a_mark_that_was_followed_is_what_counts() -> None:
    moves = BlockMoves(PagedCaches({"a": torch.zeros(2, 2)}, None), CopyPool())
    mark = object()
    moves.follow(mark)
    assert moves.now() is mark


async def test_what_the_other_thread_had_in_place_of_a_mark_is_raised() -> None:
    moves = BlockMoves(PagedCaches({"a": torch.zeros(2, 2)}, None), CopyPool())
    moves.follow(GPUFailed("an illegal access"))
    with pytest.raises(GPUFailed, match="an illegal access"):
        moves.now()
