"""A store of prompts: what calls of its connector leave behind when cancelled."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from asynckv.abc import KVAnswer, KVQuestion
from asynckv.connectors.connections import StoreConnection
from asynckv.connectors.requests import StoreMetadata, StoreRequest
from asynckv.connectors.store.scheduler import StoreScheduler
from asynckv.connectors.store.worker import StoreWorker
from asynckv.errors import PeerLost
from asynckv.testing.cancellation import Outcome
from asynckv.testing.expectations import expect, expect_error
from harness.cancellations.connectors.grounds import has_let_go
from harness.cancellations.connectors.scenario import ConnectorScenario
from harness.cancellations.connectors.store_grounds import (
    StoreGround,
    config_of,
)
from harness.cancellations.partners import Closing
from harness.cancellations.sweeper import Sweeper, ticks

__all__ = (
    "STORES",
    "a_flush",
    "a_hold",
    "a_lines_end",
    "a_load_of_blocks",
    "a_question",
    "a_save_of_blocks",
    "a_schedulers_end",
    "a_spool",
    "a_store_that_is_found",
    "a_store_workers_end",
)

_LATE: Final = 5


async def a_save_of_blocks(ground: StoreGround, sweeper: Sweeper) -> None:
    """Leaves the saves as they are: after another wait, all of it is saved."""
    keys: tuple[str, ...] = ()

    async def before() -> None:
        nonlocal keys
        keys = ground.new_keys()
        ground.begin_save(keys)
        await sweeper.pause()

    async def check(outcome: Outcome[None]) -> None:
        await ground.end_save(keys)
        await ground.load(keys)
        await ground.check_quiet()

    await sweeper.sweep(
        "a save of blocks", lambda: ground.saver.wait_for_save(), check, before
    )


async def a_flush(ground: StoreGround, sweeper: Sweeper) -> None:
    """Leaves no trace."""
    keys: tuple[str, ...] = ()

    async def before() -> None:
        nonlocal keys
        keys = ground.new_keys()
        ground.begin_save(keys)
        await ground.saver.wait_for_save()

    async def check(outcome: Outcome[None]) -> None:
        await ground.end_save(keys)
        await ground.check_quiet()

    await sweeper.sweep("a flush", lambda: ground.saver.flush(), check, before)


async def a_question(ground: StoreGround, sweeper: Sweeper) -> None:
    """Leaves no trace."""
    keys = ground.new_keys()
    question = KVQuestion("q", (*keys, "nobody has this"))

    async def before() -> None:
        await ground.save(keys)
        await sweeper.pause()

    async def check(outcome: Outcome[Any]) -> None:
        answer = outcome.value or await ground.scheduler.ask(question)
        expect(answer.num_keys == len(keys), answer)
        await ground.check_quiet()

    await sweeper.sweep(
        "a question", lambda: ground.scheduler.ask(question), check, before
    )


async def a_hold(ground: StoreGround, sweeper: Sweeper) -> None:
    """Cancelled, nothing is held."""
    holds = ground.scheduler.finder.holds

    async def check(outcome: Outcome[Any]) -> None:
        expect(len(holds) == (outcome.value is not None), f"{len(holds)} are held")
        await ground.check_quiet()

    await sweeper.sweep(
        "a hold", lambda: holds.hold(ground.store, ("key",), 1.0, 1), check
    )


async def a_load_of_blocks(ground: StoreGround, sweeper: Sweeper) -> None:
    """Cancelled, it writes to no block, and holds nothing in the store."""
    keys: tuple[str, ...] = ()
    loader, caches = ground.loader, ground.loaded

    async def before() -> None:
        nonlocal keys
        keys = ground.new_keys()
        await ground.save(keys)
        caches.spoil()
        await sweeper.pause()

    async def run() -> None:
        await loader._loading.load(ground.load_request(keys), loader._packed_blocks())
        caches.expect_computed()

    async def check(outcome: Outcome[None]) -> None:
        caches.spoil()
        await ticks(_LATE)
        caches.expect_spoilt()
        await ground.load(keys)
        await ground.check_quiet()

    await sweeper.sweep("a load of blocks", run, check, before)


async def a_spool(ground: StoreGround, sweeper: Sweeper) -> None:
    """From the caches, and into them; cancelled, nothing touches them any more."""
    packed, caches = ground.loader._packed_blocks(), ground.loaded
    order = StoreRequest("s", ground.new_keys(), (caches.block_ids,))
    parts = list(order.parts(packed.num_blocks))

    async def before() -> None:
        caches.compute()

    async def there_and_back() -> None:
        values = [await packed.gather(part.block_ids) for part in parts]
        caches.spoil()
        for part, value in zip(parts, values, strict=True):
            await packed.scatter(value, part.block_ids)
        caches.expect_computed()

    async def check(outcome: Outcome[None]) -> None:
        caches.spoil()
        await ticks(_LATE)
        caches.expect_spoilt()
        await ground.check_quiet()

    await sweeper.sweep("a packed", there_and_back, check, before)


async def a_lines_end(ground: StoreGround, sweeper: Sweeper) -> None:
    """Of the way to a store, while it is dialled."""
    line: StoreConnection
    dialling: asyncio.Task[object]
    closing: Closing

    async def before() -> None:
        nonlocal line, dialling, closing
        config, closing = config_of(ground.url), Closing()
        line = StoreConnection(config, ground.new_engine(), None, "line")
        dialling = asyncio.create_task(line.store())
        await ticks(3)
        await sweeper.pause()

    async def check(outcome: Outcome[None]) -> None:
        if not closing.has_begun:
            await line.aclose()
        await asyncio.wait({dialling})
        dialling.exception()
        await expect_error(PeerLost, line.store())
        await ground.check_quiet()

    await sweeper.sweep(
        "the end of a line", lambda: closing.run(line.aclose), check, before
    )


async def a_schedulers_end(ground: StoreGround, sweeper: Sweeper) -> None:
    """While it asks: it hears that nothing is there, now and later."""
    scheduler: StoreScheduler
    asking: asyncio.Task[KVAnswer]
    closing: Closing
    question = KVQuestion("q", ("key",))

    async def before() -> None:
        nonlocal scheduler, asking, closing
        closing = Closing()
        scheduler = StoreScheduler(config_of(ground.url), ground.new_engine())
        await scheduler.finder.holds.hold(ground.store, ("key",), 1.0, 1)
        asking = asyncio.create_task(scheduler.ask(question))
        await ticks(3)
        await sweeper.pause()

    async def check(outcome: Outcome[None]) -> None:
        if not closing.has_begun:
            await scheduler.aclose()
        expect(not (await asking).num_keys, "it is stored")
        expect(not (await scheduler.ask(question)).num_keys, "it is stored")
        await ground.check_quiet()

    await sweeper.sweep(
        "a scheduler's end", lambda: closing.run(scheduler.aclose), check, before
    )


async def a_store_that_is_found(ground: StoreGround, sweeper: Sweeper) -> None:
    """Cancelled, the next call finds it."""
    line: StoreConnection

    async def before() -> None:
        nonlocal line
        config = config_of(ground.url)
        line = StoreConnection(config, ground.new_engine(), None, "finder")
        await sweeper.pause()

    async def check(outcome: Outcome[object]) -> None:
        await (await line.store()).contains(["key"])
        await line.aclose()
        await ground.check_quiet()

    await sweeper.sweep("a store", lambda: line.store(), check, before)


async def a_store_workers_end(ground: StoreGround, sweeper: Sweeper) -> None:
    """In the middle of a load and of a save: its memory is quiet."""
    worker: StoreWorker
    closing: Closing

    async def before() -> None:
        nonlocal worker, closing
        keys, closing = ground.new_keys(), Closing()
        await ground.save(keys)
        worker = ground.new_worker()
        ground.loaded.compute()
        order = StoreRequest("s", ground.new_keys(), (ground.loaded.block_ids,))
        orders = StoreMetadata((ground.load_request(keys),), (order,))
        worker.bind_connector_metadata(orders)
        await worker.start_load_kv()
        await worker.wait_for_save()
        await sweeper.pause()

    async def check(outcome: Outcome[None]) -> None:
        if not closing.has_begun:
            await worker.aclose()
        ground.loaded.spoil()
        await ticks(_LATE)
        ground.loaded.expect_spoilt()
        await has_let_go(worker)
        await ground.check_quiet()

    await sweeper.sweep(
        "a store worker's end", lambda: closing.run(worker.shutdown), check, before
    )


STORES: Final[tuple[ConnectorScenario[StoreGround], ...]] = (
    ConnectorScenario(a_save_of_blocks, ("StoreWorker.wait_for_save",)),
    ConnectorScenario(a_flush, ("StoreWorker.flush", "Transfers.wait_others")),
    ConnectorScenario(a_question, ("StoreScheduler.ask", "PrefixLookup.find")),
    ConnectorScenario(a_hold, ("StorePins.hold",)),
    ConnectorScenario(a_load_of_blocks, ("StoreLoading.load",)),
    ConnectorScenario(
        a_spool,
        (
            "PackedBlocks.gather",
            "PackedBlocks.scatter",
            "BlockMoves.gather",
            "BlockMoves.scatter",
        ),
    ),
    ConnectorScenario(a_store_that_is_found, ("StoreConnection.store",)),
    ConnectorScenario(a_lines_end, ("StoreConnection.aclose",)),
    ConnectorScenario(
        a_schedulers_end,
        (
            *("StoreScheduler.aclose", "PrefixLookup.aclose"),
            *("StorePins.aclose", "StorePins.release"),
        ),
    ),
    ConnectorScenario(a_store_workers_end, ("StoreWorker.aclose",)),
)
