"""Layers on their way within the GPU that pushes them: cancelled anywhere."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from asynckv.connectors.p2p.save import P2PSave
from asynckv.testing.blocked import until
from asynckv.transfers.source import release_staged
from harness.cancellations.connectors.grounds import P2PGround
from harness.cancellations.sweeper import Sweeper, scenario
from harness.gpu_pairs import SharedPuts

__all__: tuple[str, ...] = ()


class _GivenUp(Exception):
    """The entry is not to be whole."""


@scenario("BlockMoves.gather_there", "BlockMoves.open", "BlockMoves.open_if_possible")
async def a_take(ground: P2PGround, sweeper: Sweeper) -> None:
    """Cancelled, it reads no block, and has no memory of the GPU."""
    worker, caches = ground.prefill.workers[0], ground.prefill.caches[0]
    moves, order = worker._registered(), ground.save_request(ground.new_name())
    ((find, entry_id, _),) = worker.routes.targets(order)
    buffer, specs = await find(), moves.caches.specs(order.block_ids)

    async def take(save: P2PSave, ahead: asyncio.Queue[Any]) -> None:
        offers: asyncio.Queue[str] = asyncio.Queue()
        for layer in ground.model.layer_names:
            offers.put_nowait(layer)
        await save._read_all(writer, offers, ahead)

    async def open_again() -> None:
        moves._is_open = False
        await moves.open_if_possible()

    async def check(ahead: asyncio.Queue[Any]) -> None:
        caches.spoil()
        while not ahead.empty():
            release_staged(ahead.get_nowait().staged)
        (line,) = worker.routes.peers._lines.values()
        if line._peer is not None:
            left = SharedPuts(line._peer)
            await until(lambda: not left.staged_bytes)

    opening = buffer.open_insert(order.token_ids, None, specs, entry_id=entry_id)
    with contextlib.suppress(_GivenUp):
        async with opening as writer:
            async for cancel in sweeper.sweep("what a save takes", is_open=True):
                caches.compute()
                save, ahead = worker._saving.new_save(order), asyncio.Queue[Any]()
                save.offer_rest(moves.now())
                await cancel(take, save, ahead)
                await check(ahead)
            async for cancel in sweeper.sweep("what a GPU has ready", is_open=True):
                await cancel(open_again)
                await check(ahead)
            raise _GivenUp
