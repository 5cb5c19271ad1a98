"""Blocks on their way within the GPU that leave for a store: cancelled anywhere."""

from __future__ import annotations

from typing import Final

import torch

from asynckv.connectors.store_leaving import LeavingBlock
from asynckv.testing.blocked import until
from asynckv.testing.cancellation import Outcome
from asynckv.testing.cancellations.connectors.scenario import ConnectorScenario
from asynckv.testing.cancellations.connectors.store_grounds import StoreGround
from asynckv.testing.cancellations.sweeper import Sweeper
from asynckv.testing.expectations import expect, expect_same
from asynckv.testing.shared_puts import SharedPuts

__all__ = ("SAVING", "a_block_that_leaves")

_INDEX: Final = 1


async def a_block_that_leaves(ground: StoreGround, sweeper: Sweeper) -> None:
    """Cancelled, it is stored whole or not at all, is read no more, and has no memory
    of the GPU."""
    saver, caches = ground.saver, ground.saved
    spool, ids = saver._spooled(), (caches.block_ids,)
    peer = saver._line._line.connected
    key: str
    caches.compute()
    value = await spool.gather(ids, _INDEX)

    async def before() -> None:
        nonlocal key
        (key, *_) = ground.new_keys()
        caches.compute()
        await sweeper.pause()

    async def leave() -> None:
        block = saver._saving._leaving.take(spool.block_nbytes)
        if not isinstance(block, LeavingBlock):
            raise AssertionError("nothing leaves from this GPU")
        try:
            await spool.reached(saver._now())
            await spool.gather_there(block.place(), ids, _INDEX)
            caches.spoil()
            await block.put(key)
        finally:
            block.release()

    async def check(outcome: Outcome[None]) -> None:
        caches.spoil()
        expect(saver._line._line.connected is peer, "the link was lost")
        found = await ground.store.get(key)
        expect(isinstance(found, torch.Tensor) or outcome.cancelled, "it is not stored")
        if found is not None:
            expect_same(found, value)
            del found
        if peer is not None:
            left = SharedPuts(peer)
            await until(lambda: not left.staged_bytes)
        await ground.check_quiet()

    await sweeper.sweep("a block that leaves", leave, check, before)


SAVING: Final[tuple[ConnectorScenario[StoreGround], ...]] = (
    ConnectorScenario(
        a_block_that_leaves,
        ("Spool.reached", "Spool.gather_there", "LeavingBlock.put"),
    ),
)
