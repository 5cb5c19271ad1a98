"""Steps of an engine: what its waits leave behind when they are cancelled."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.connectors.requests import LoadRequest, P2PMetadata
from asynckv.testing.expectations import expect
from harness.cancellations.connectors.grounds import P2PGround, until_loaded
from harness.cancellations.sweeper import Sweeper, scenario, ticks

__all__: tuple[str, ...] = ()

_MAX_TICKS: Final = 8
_TOKEN_NBYTES: Final = 8


async def _begin_load(ground: P2PGround, *, is_async: bool) -> LoadRequest:
    """Issue the load of a prompt that was saved."""
    name = ground.new_name()
    await ground.save(name)
    for caches in ground.decode.caches:
        caches.spoil()
    order = ground.load_request(name, is_async=is_async)
    await ground.begin_load(order)
    return order


@scenario("P2PWorker.wait_for_layer_load", "P2PLoad.wait_for")
async def a_layer_wait(ground: P2PGround, sweeper: Sweeper) -> None:
    """Leaves no trace: the load goes on."""

    async def wait() -> None:
        for layer in ground.model.layer_names:
            for worker in ground.decode.workers:
                await worker.wait_for_layer_load(layer)

    async for cancel in sweeper.sweep():
        order = await _begin_load(ground, is_async=False)
        outcome = await cancel(wait)
        if not outcome.cancelled:
            for caches in ground.decode.caches:
                caches.expect_computed()
        await ground.end_load(order)


@scenario(
    *("P2PWorker.wait_for_save", "BlockRelease.release"),
    "BlockRelease.release_when_wanted",
)
async def a_save_wait(ground: P2PGround, sweeper: Sweeper) -> None:
    """Leaves the saves as they are: after another one, blocks may be overwritten.

    The same where the engine holds the blocks, and wants them back while it waits.
    """

    def hold(is_so: bool) -> None:
        for worker in ground.prefill.workers:
            worker._saving.engine = msgspec.structs.replace(
                worker.engine, holds_saved_blocks=is_so
            )

    async def wait(is_held: bool) -> None:
        for worker in ground.prefill.workers:
            if is_held:
                asyncio.get_running_loop().call_soon(worker.let_go_of_blocks, None)
            await worker.wait_for_save()

    for is_held in (False, True):
        async for cancel in sweeper.sweep("of held blocks" * is_held):
            name = ground.new_name()
            hold(is_held)
            ground.begin_save(name)
            await cancel(wait, is_held)
            hold(False)
            await ground.end_save(name)
            await ground.load(name)


@scenario(is_costly=True)
async def a_save_that_is_staged(ground: P2PGround, sweeper: Sweeper) -> None:
    """The same where there is no room: it goes on from a copy, when there is some."""

    async def wait() -> None:
        for worker in ground.prefill.workers:
            await worker.wait_for_save()

    async for cancel in sweeper.sweep():
        fillers: dict[LookupBuffer, str] = {}
        for buffer in ground.buffers().values():
            room = buffer.statistics().max_bytes - _TOKEN_NBYTES
            full = torch.zeros(room, dtype=torch.uint8)
            fillers[buffer] = await buffer.insert([0], None, full, None, None)
        name = ground.new_name()
        ground.begin_save(name)
        await cancel(wait)
        await wait()
        for worker in ground.prefill.workers:
            expect(worker.statistics().staged_bytes > 0, worker.statistics())
        for caches in ground.prefill.caches:
            caches.spoil()
        for buffer, filler in fillers.items():
            await buffer.withdraw(filler)
        await ground.end_save(name)
        await ground.load(name)
        await ground.check_quiet()
        for worker in ground.prefill.workers:
            expect(not worker.statistics().staged_bytes, worker.statistics())


@scenario(is_costly=True)
async def a_load_that_is_aborted(ground: P2PGround, sweeper: Sweeper) -> None:
    """After so many ticks: its end is told when its blocks are quiet, and once."""
    async for cancel in sweeper.sweep():
        order = await _begin_load(ground, is_async=True)
        await cancel(ticks, _MAX_TICKS)
        for worker in ground.decode.workers:
            worker.bind_connector_metadata(P2PMetadata(aborts=(order.request_id,)))
            await worker.start_load_kv()
            worker.clear_connector_metadata()
        for worker in ground.decode.workers:
            caches = ground.decode.caches[worker.engine.rank]
            await until_loaded(worker)
            results = worker.get_finished()
            expect(results.finished_recving == {order.request_id}, results)
            if results.failed_recving:
                expect(results.invalid_block_ids == {*caches.block_ids}, results)
            else:
                caches.expect_computed()
            caches.spoil()
        await ground.check_quiet()
        for caches in ground.decode.caches:
            caches.expect_spoilt()
