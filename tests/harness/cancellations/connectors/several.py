"""Several connectors as one: each does what it does alone, and none is forgotten."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from asynckv.abc import KVConnectorMetadata, KVQuestion
from asynckv.connectors.multi import MultiMetadata, MultiScheduler, MultiWorker
from asynckv.connectors.p2p.worker import P2PWorker
from asynckv.connectors.requests import P2PMetadata, StoreMetadata, StoreRequest
from asynckv.connectors.store.scheduler import StoreScheduler
from asynckv.connectors.store.worker import StoreWorker
from asynckv.testing.cancellation import Outcome
from asynckv.testing.expectations import expect
from harness.cancellations.connectors.closing import new_worker
from harness.cancellations.connectors.grounds import (
    P2PGround,
    Scheme,
    has_let_go,
    open_p2p,
    until_saved,
    urls_of,
)
from harness.cancellations.connectors.scenario import ConnectorScenario
from harness.cancellations.connectors.store_grounds import (
    StoreGround,
    config_of,
    open_store_ground,
)
from harness.cancellations.partners import Closing
from harness.cancellations.quiet import tasks_now
from harness.cancellations.sweeper import Sweeper, ticks

__all__ = (
    "SEVERAL",
    "SeveralGround",
    "a_layer_of_all",
    "a_save_by_all",
    "all_who_ask",
    "open_several",
    "the_end_of_all",
    "the_start_of_all",
)

_LATE: Final = 5


@dataclasses.dataclass(frozen=True)
class SeveralGround:
    """Two connectors of one engine: ``p2p`` to others, and one to a ``store``."""

    p2p: P2PGround
    store: StoreGround

    def save_metadata(self, name: str, keys: tuple[str, ...]) -> MultiMetadata:
        """Save the prompt with both of them."""
        blocks = StoreRequest("s", keys, (self.p2p.prefill.caches[0].block_ids,))
        return _metadata(
            P2PMetadata(saves=(self.p2p.save_request(name),)),
            StoreMetadata(saves=(blocks,)),
        )

    def saver(self, *, also: P2PWorker | None = None) -> MultiWorker:
        """Return the connectors of the engine that prefills."""
        worker = also or self.p2p.prefill.workers[0]
        first = self.store.saver.engine
        engine = msgspec.structs.replace(first, engine_id="saver-2")
        mine = StoreWorker(config_of(self.store.url), engine)
        mine.register_kv_caches(self.p2p.prefill.caches[0].layers)
        return MultiWorker([worker, mine])

    async def check_quiet(self) -> None:
        """Wait until nothing is under way.

        :raises AssertionError: something is left, and what
        """
        await self.p2p.check_quiet()
        await self.store.check_quiet()


def _metadata(*parts: KVConnectorMetadata) -> MultiMetadata:
    return MultiMetadata(tuple(map(msgspec.msgpack.encode, parts)))


@contextlib.asynccontextmanager
async def open_several(scheme: Scheme) -> AsyncIterator[SeveralGround]:
    """Open what two connectors of one engine are connected to."""
    async with open_p2p(scheme) as p2p, open_store_ground(scheme) as store:
        p2p.tasks = store.tasks = tasks_now()
        yield SeveralGround(p2p, store)


async def a_save_by_all(ground: SeveralGround, sweeper: Sweeper) -> None:
    """Leaves the saves as they are: after another wait, both have all of it."""
    name = ""
    keys: tuple[str, ...] = ()
    worker: MultiWorker
    caches = ground.p2p.prefill.caches[0]

    async def before() -> None:
        nonlocal name, keys, worker
        name, keys = ground.p2p.new_name(), ground.store.new_keys()
        worker = ground.saver()
        caches.compute()
        worker.bind_connector_metadata(ground.save_metadata(name, keys))
        await sweeper.pause()

    async def check(outcome: Outcome[None]) -> None:
        await worker.wait_for_save()
        caches.spoil()
        worker.clear_connector_metadata()
        mine = worker.children[1]
        if isinstance(mine, StoreWorker):
            await mine.flush()
        await until_saved(ground.p2p.prefill.workers[0])
        results = worker.get_finished()
        expect(results.finished_sending == {f"p {name}"}, results)
        await mine.aclose()
        await ground.p2p.load(name)
        await ground.store.load(keys)
        await ground.check_quiet()

    await sweeper.sweep("a save by all", lambda: worker.wait_for_save(), check, before)


async def a_layer_of_all(ground: SeveralGround, sweeper: Sweeper) -> None:
    """Leaves no trace: the load goes on."""
    p2p = ground.p2p
    worker = MultiWorker([p2p.decode.workers[0], ground.store.loader])
    name = ""

    async def before() -> None:
        nonlocal name
        name = p2p.new_name()
        await p2p.save(name)
        p2p.decode.caches[0].spoil()
        order = p2p.load_request(name, is_async=False)
        loads = P2PMetadata(loads=(order,))
        worker.bind_connector_metadata(_metadata(loads, StoreMetadata()))
        await worker.start_load_kv()
        await sweeper.pause()

    async def wait() -> None:
        for layer in p2p.model.layer_names:
            await worker.wait_for_layer_load(layer)
        p2p.decode.caches[0].expect_computed()

    async def check(outcome: Outcome[None]) -> None:
        await p2p.end_load(p2p.load_request(name))
        worker.clear_connector_metadata()
        await ground.check_quiet()

    await sweeper.sweep("a layer of all", wait, check, before)


async def the_start_of_all(ground: SeveralGround, sweeper: Sweeper) -> None:
    """Cancelled, none of them is open."""
    worker: MultiWorker

    with urls_of(ground.p2p.scheme, 2) as ((first, second),):

        async def before() -> None:
            nonlocal worker
            sides = ground.p2p.prefill, ground.p2p.prefill
            worker = MultiWorker(
                [
                    new_worker(ground.p2p, side, url)[0]
                    for side, url in zip(sides, (first, second), strict=True)
                ]
            )
            await sweeper.pause()

        async def check(outcome: Outcome[None]) -> None:
            if outcome.cancelled:
                await ground.check_quiet()  # nothing is open, before it is closed
            await worker.aclose()
            await ground.check_quiet()

        await sweeper.sweep("the start of all", lambda: worker.start(), check, before)


async def the_end_of_all(ground: SeveralGround, sweeper: Sweeper) -> None:
    """Each of them has ended, and memory is quiet."""
    worker: MultiWorker
    closing: Closing
    p2p, caches = ground.p2p, ground.p2p.prefill.caches[0]

    with urls_of(p2p.scheme, 1) as ((url,),):

        async def before() -> None:
            nonlocal worker, closing
            closing = Closing()
            mine, _ = new_worker(p2p, p2p.prefill, url)
            mine.register_kv_caches(caches.layers)
            worker = ground.saver(also=mine)
            await worker.start()
            caches.compute()
            keys = ground.store.new_keys()
            metadata = ground.save_metadata(p2p.new_name(), keys)
            worker.bind_connector_metadata(metadata)
            await worker.start_load_kv()
            await worker.children[1].wait_for_save()
            worker.save_kv_layer(p2p.model.layer_names[0])
            await sweeper.pause()

        async def check(outcome: Outcome[None]) -> None:
            if not closing.has_begun:
                await worker.aclose()
            caches.spoil()
            await ticks(_LATE)
            caches.expect_spoilt()
            for mine in worker.children:
                await has_let_go(mine)
            await ground.check_quiet()

        await sweeper.sweep(
            "the end of all", lambda: closing.run(worker.aclose), check, before
        )


async def all_who_ask(ground: SeveralGround, sweeper: Sweeper) -> None:
    """Begin, ask and end; cancelled, nobody is connected any more after the end."""
    engine = ground.store.loader.engine
    scheduler: MultiScheduler
    closing: Closing

    async def before() -> None:
        nonlocal scheduler, closing
        closing = Closing()
        config = config_of(ground.store.url)
        children = [
            StoreScheduler(config, msgspec.structs.replace(engine, engine_id=name))
            for name in ("one", "two")
        ]
        scheduler = MultiScheduler(children)
        await sweeper.pause()

    async def ask() -> None:
        await scheduler.start()
        for asker in range(2):
            answer = await scheduler.ask(KVQuestion("q", ("key",), asker))
            expect(not answer.num_keys, answer)

    async def check(outcome: Outcome[None]) -> None:
        await ask()
        await scheduler.aclose()
        await ground.check_quiet()

    await sweeper.sweep("questions of all", ask, check, before)

    async def before_end() -> None:
        await before()
        await ask()

    async def check_end(outcome: Outcome[None]) -> None:
        if not closing.has_begun:
            await scheduler.aclose()
        await ground.check_quiet()

    await sweeper.sweep(
        "the end of all who ask",
        lambda: closing.run(scheduler.aclose),
        check_end,
        before_end,
    )


SEVERAL: Final[tuple[ConnectorScenario[SeveralGround], ...]] = (
    ConnectorScenario(a_save_by_all, ("MultiWorker.wait_for_save",)),
    ConnectorScenario(a_layer_of_all, ("MultiWorker.wait_for_layer_load",)),
    ConnectorScenario(the_start_of_all, ("MultiWorker.start",)),
    ConnectorScenario(the_end_of_all, ("MultiWorker.aclose",)),
    ConnectorScenario(all_who_ask, ("MultiScheduler.ask", "MultiScheduler.aclose")),
)
