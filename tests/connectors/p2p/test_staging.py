from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Sequence

import pytest
import torch

from asynckv.connectors.caches import BlockMoves, PagedCaches
from asynckv.connectors.p2p.gpu_layers import Staging
from asynckv.devices.copying import CopyPool
from asynckv.devices.cuda import Event
from asynckv.tensors.blocks import KVBlocks
from asynckv.testing.blocked import until, until_blocked

POOL = torch.arange(32.0).view(8, 4)
BLOCKS = {layer: {f"{layer}.key": KVBlocks(POOL, (5, 1))} for layer in "ab"}
NBYTES = 2 * 2 * 16


def moves_of() -> BlockMoves:
    return BlockMoves(PagedCaches({"a": POOL}, None), CopyPool())


async def test_copies_are_what_the_blocks_were() -> None:
    staging, pool = Staging(NBYTES), POOL.clone()
    blocks = {"a": {"a.key": KVBlocks(pool, (5, 1))}}
    copy = await staging.copy(blocks, moves_of())
    assert copy is not None
    pool.zero_()
    assert copy.tensor("a", "a.key").tolist() == POOL[[5, 1]].tolist()


async def test_what_does_not_fit_is_not_copied_until_something_is_dropped() -> None:
    staging, moves = Staging(NBYTES), moves_of()
    copy = await staging.copy(BLOCKS, moves)
    assert copy is not None and staging.used_bytes == NBYTES
    assert await staging.copy(BLOCKS, moves) is None
    copy.drop("a")
    copy.drop("a")
    assert staging.used_bytes == NBYTES // 2
    assert await staging.copy(BLOCKS, moves) is None
    copy.drop()
    assert staging.used_bytes == 0
    assert await staging.copy(BLOCKS, moves) is not None
    assert staging.copies == 2


async def test_megabytes_that_are_dropped_are_not_freed_on_the_loop() -> None:
    large, moves, freed_by = torch.zeros(4, 2**20), moves_of(), list[int]()
    copy = await Staging(2**30).copy({"a": {"a.key": KVBlocks(large, (3, 0))}}, moves)
    assert copy is not None
    weakref.finalize(
        copy.tensor("a", "a.key"), lambda: freed_by.append(threading.get_ident())
    )
    copy.drop()
    await until(lambda: bool(freed_by))
    assert freed_by != [threading.get_ident()]
    moves.pool.close()


class Stuck(BlockMoves):
    """Gathers until it is cancelled."""

    async def gather(
        self,
        sources: Sequence[KVBlocks],
        targets: Sequence[torch.Tensor],
        mark: Event | None,
    ) -> None:
        await asyncio.Event().wait()


async def test_a_cancelled_copy_takes_no_room() -> None:
    staging, stuck = Staging(NBYTES), Stuck(moves_of().caches, CopyPool())
    copying = asyncio.create_task(staging.copy(BLOCKS, stuck))
    await until_blocked(copying)
    assert staging.used_bytes == NBYTES
    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert await staging.copy(BLOCKS, moves_of()) is not None
    assert staging.copies == 1


async def test_who_waits_for_room_is_told_of_what_is_dropped() -> None:
    staging = Staging(NBYTES)
    copy = await staging.copy(BLOCKS, moves_of())
    assert copy is not None
    before = staging.more_room
    copy.drop("a")
    assert before.is_set() and not staging.more_room.is_set()
