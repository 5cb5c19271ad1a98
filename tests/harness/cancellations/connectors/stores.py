"""A store of prompts: what calls of its connector leave behind when cancelled."""

from __future__ import annotations

import asyncio

from asynckv.abc import KVQuestion
from asynckv.connectors.connections import StoreConnection
from asynckv.connectors.requests import StoreMetadata, StoreRequest
from asynckv.connectors.store.scheduler import StoreScheduler
from asynckv.errors import PeerLost
from asynckv.testing.expectations import expect, expect_error
from harness.cancellations.connectors.grounds import expect_quiet, has_let_go
from harness.cancellations.connectors.store_grounds import StoreGround, config_of
from harness.cancellations.sweeper import Sweeper, scenario, ticks

__all__ = ("a_load_of_blocks", "a_save_of_blocks")


@scenario("StoreWorker.wait_for_save")
async def a_save_of_blocks(ground: StoreGround, sweeper: Sweeper) -> None:
    """Leaves the saves as they are: after another wait, all of it is saved."""
    async for cancel in sweeper.sweep():
        keys = ground.new_keys()
        ground.begin_save(keys)
        await cancel(ground.saver.wait_for_save)
        await ground.end_save(keys)
        await ground.load(keys)


@scenario("StoreWorker.flush", "Transfers.wait_others")
async def a_flush(ground: StoreGround, sweeper: Sweeper) -> None:
    """Leaves no trace."""
    async for cancel in sweeper.sweep():
        keys = ground.new_keys()
        ground.begin_save(keys)
        await ground.saver.wait_for_save()
        await cancel(ground.saver.flush)
        await ground.end_save(keys)


@scenario("StoreScheduler.ask", "PrefixLookup.find")
async def a_question(ground: StoreGround, sweeper: Sweeper) -> None:
    """Leaves no trace."""
    keys = ground.new_keys()
    question = KVQuestion("q", (*keys, "nobody has this"))
    async for cancel in sweeper.sweep():
        await ground.save(keys)
        outcome = await cancel(ground.scheduler.ask, question)
        answer = outcome.value or await ground.scheduler.ask(question)
        expect(answer.num_keys == len(keys), answer)


@scenario("StorePins.hold")
async def a_hold(ground: StoreGround, sweeper: Sweeper) -> None:
    """Cancelled, nothing is held."""
    holds = ground.scheduler.finder.holds
    async for cancel in sweeper.sweep():
        outcome = await cancel(holds.hold, ground.store, ("key",), 1.0, 1)
        expect(len(holds) == (outcome.value is not None), f"{len(holds)} are held")


@scenario("StoreLoading.load")
async def a_load_of_blocks(ground: StoreGround, sweeper: Sweeper) -> None:
    """Cancelled, it writes to no block, and holds nothing in the store."""
    loader, caches = ground.loader, ground.loaded

    async def load(keys: tuple[str, ...]) -> None:
        await loader._loading.load(ground.load_request(keys), loader._packed_blocks())
        caches.expect_computed()

    async for cancel in sweeper.sweep():
        keys = ground.new_keys()
        await ground.save(keys)
        caches.spoil()
        await cancel(load, keys)
        await expect_quiet(caches)
        await ground.load(keys)


@scenario("StoreRank.keys_of", "keys_of_ranks")
async def keys_of_a_long_request(ground: StoreGround, sweeper: Sweeper) -> None:
    """Leaves no trace."""
    rank = ground.loader._loading._rank
    order = StoreRequest("k", tuple(f"{number}" for number in range(600)), ())
    async for cancel in sweeper.sweep():
        await cancel(rank.keys_of, order)
        expect(len(await rank.keys_of(order)) == 600, "each has a key")


@scenario(
    *("PackedBlocks.gather", "PackedBlocks.scatter"),
    *("BlockMoves.gather", "BlockMoves.scatter"),
)
async def packed_blocks(ground: StoreGround, sweeper: Sweeper) -> None:
    """From the caches, and into them; cancelled, nothing touches them any more."""
    packed, caches = ground.loader._packed_blocks(), ground.loaded
    order = StoreRequest("s", ground.new_keys(), (caches.block_ids,))
    parts = list(order.parts(packed.num_blocks))

    async def there_and_back() -> None:
        values = [await packed.gather(part.block_ids) for part in parts]
        caches.spoil()
        for part, value in zip(parts, values, strict=True):
            await packed.scatter(value, part.block_ids)
        caches.expect_computed()

    async for cancel in sweeper.sweep():
        caches.compute()
        await cancel(there_and_back)
        await expect_quiet(caches)


@scenario("StoreConnection.store")
async def a_store_that_is_found(ground: StoreGround, sweeper: Sweeper) -> None:
    """Cancelled, the next call finds it."""
    config = config_of(ground.url)
    async for cancel in sweeper.sweep():
        line = StoreConnection(config, ground.new_engine(), None, "finder")
        await cancel(line.store)
        await (await line.store()).contains(["key"])
        await line.aclose()


@scenario("StoreConnection.aclose")
async def a_connections_end(ground: StoreGround, sweeper: Sweeper) -> None:
    """Of that to a store, while it is dialled."""
    config = config_of(ground.url)
    async for cancel in sweeper.sweep():
        line = StoreConnection(config, ground.new_engine(), None, "line")
        dialling = asyncio.create_task(line.store())
        await ticks(3)
        await cancel(line.aclose)
        if not cancel.has_begun:
            await line.aclose()
        await asyncio.wait({dialling})
        dialling.exception()
        await expect_error(PeerLost, line.store())


@scenario(
    *("StoreScheduler.aclose", "PrefixLookup.aclose"),
    *("StorePins.aclose", "StorePins.release"),
)
async def a_schedulers_end(ground: StoreGround, sweeper: Sweeper) -> None:
    """While it asks: it hears that nothing is there, now and later."""
    question = KVQuestion("q", ("key",))
    async for cancel in sweeper.sweep():
        scheduler = StoreScheduler(config_of(ground.url), ground.new_engine())
        await scheduler.finder.holds.hold(ground.store, ("key",), 1.0, 1)
        asking = asyncio.create_task(scheduler.ask(question))
        await ticks(3)
        await cancel(scheduler.aclose)
        if not cancel.has_begun:
            await scheduler.aclose()
        expect(not (await asking).num_keys, "it is stored")
        expect(not (await scheduler.ask(question)).num_keys, "it is stored")


@scenario("StoreWorker.aclose")
async def a_store_workers_end(ground: StoreGround, sweeper: Sweeper) -> None:
    """In the middle of a load and of a save: its memory is quiet."""
    async for cancel in sweeper.sweep():
        keys, worker = ground.new_keys(), ground.new_worker()
        await ground.save(keys)
        ground.loaded.compute()
        order = StoreRequest("s", ground.new_keys(), (ground.loaded.block_ids,))
        orders = StoreMetadata((ground.load_request(keys),), (order,))
        worker.bind_connector_metadata(orders)
        await worker.start_load_kv()
        await worker.wait_for_save()
        await cancel(worker.shutdown)
        if not cancel.has_begun:
            await worker.aclose()
        await expect_quiet(ground.loaded)
        await has_let_go(worker)
