"""Several connectors as one: each does what it does alone, and none is forgotten."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator

import msgspec

from asynckv.abc import KVConnectorMetadata, KVQuestion
from asynckv.connectors.multi import MultiMetadata, MultiScheduler, MultiWorker
from asynckv.connectors.p2p.worker import P2PWorker
from asynckv.connectors.requests import P2PMetadata, StoreMetadata, StoreRequest
from asynckv.connectors.store.scheduler import StoreScheduler
from asynckv.connectors.store.worker import StoreWorker
from asynckv.testing.expectations import expect
from harness.cancellations.connectors.dialling import new_worker
from harness.cancellations.connectors.grounds import (
    P2PGround,
    Scheme,
    expect_quiet,
    has_let_go,
    open_p2p,
    until_saved,
    urls_of,
)
from harness.cancellations.connectors.store_grounds import (
    StoreGround,
    config_of,
    open_store_ground,
)
from harness.cancellations.grounds import tasks_now
from harness.cancellations.sweeper import Sweeper, scenario

__all__ = ("SeveralGround", "open_several")


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


@scenario("MultiWorker.wait_for_save")
async def a_save_by_all(ground: SeveralGround, sweeper: Sweeper) -> None:
    """Leaves the saves as they are: after another wait, both have all of it."""
    caches = ground.p2p.prefill.caches[0]
    async for cancel in sweeper.sweep():
        name, keys = ground.p2p.new_name(), ground.store.new_keys()
        worker = ground.saver()
        caches.compute()
        worker.bind_connector_metadata(ground.save_metadata(name, keys))
        await cancel(worker.wait_for_save)
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


@scenario("MultiWorker.wait_for_layer_load")
async def a_layer_of_all(ground: SeveralGround, sweeper: Sweeper) -> None:
    """Leaves no trace: the load goes on."""
    p2p = ground.p2p
    worker = MultiWorker([p2p.decode.workers[0], ground.store.loader])

    async def wait() -> None:
        for layer in p2p.model.layer_names:
            await worker.wait_for_layer_load(layer)
        p2p.decode.caches[0].expect_computed()

    async for cancel in sweeper.sweep():
        name = p2p.new_name()
        await p2p.save(name)
        p2p.decode.caches[0].spoil()
        loads = P2PMetadata(loads=(p2p.load_request(name, is_async=False),))
        worker.bind_connector_metadata(_metadata(loads, StoreMetadata()))
        await worker.start_load_kv()
        await cancel(wait)
        await p2p.end_load(p2p.load_request(name))
        worker.clear_connector_metadata()


@scenario("MultiWorker.start")
async def the_start_of_all(ground: SeveralGround, sweeper: Sweeper) -> None:
    """Cancelled, none of them is open."""
    p2p = ground.p2p
    with urls_of(p2p.scheme, 2) as (urls,):
        async for cancel in sweeper.sweep():
            worker = MultiWorker([new_worker(p2p, p2p.prefill, url)[0] for url in urls])
            outcome = await cancel(worker.start)
            if outcome.cancelled:
                await ground.check_quiet()  # nothing is open, before it is closed
            await worker.aclose()


@scenario("MultiWorker.aclose")
async def the_end_of_all(ground: SeveralGround, sweeper: Sweeper) -> None:
    """Each of them has ended, and memory is quiet."""
    p2p, caches = ground.p2p, ground.p2p.prefill.caches[0]
    with urls_of(p2p.scheme, 1) as ((url,),):
        async for cancel in sweeper.sweep():
            mine, _ = new_worker(p2p, p2p.prefill, url)
            mine.register_kv_caches(caches.layers)
            worker = ground.saver(also=mine)
            await worker.start()
            caches.compute()
            metadata = ground.save_metadata(p2p.new_name(), ground.store.new_keys())
            worker.bind_connector_metadata(metadata)
            await worker.start_load_kv()
            await worker.children[1].wait_for_save()
            worker.save_kv_layer(p2p.model.layer_names[0])
            await cancel(worker.aclose)
            if not cancel.has_begun:
                await worker.aclose()
            await expect_quiet(caches)
            for child in worker.children:
                await has_let_go(child)


@scenario("MultiScheduler.ask", "MultiScheduler.aclose")
async def all_who_ask(ground: SeveralGround, sweeper: Sweeper) -> None:
    """Begin, ask and end; cancelled, nobody is connected any more after the end."""
    config, engine = config_of(ground.store.url), ground.store.loader.engine

    async def ask(scheduler: MultiScheduler) -> None:
        await scheduler.start()
        for asker in range(2):
            answer = await scheduler.ask(KVQuestion("q", ("key",), asker))
            expect(not answer.num_keys, answer)

    for way in ("asked", "ended"):
        async for cancel in sweeper.sweep(way):
            engines = (
                msgspec.structs.replace(engine, engine_id=name)
                for name in ("one", "two")
            )
            scheduler = MultiScheduler([StoreScheduler(config, one) for one in engines])
            await sweeper.pause()
            if way == "asked":
                await cancel(ask, scheduler)
                await ask(scheduler)
            else:
                await ask(scheduler)
                await cancel(scheduler.aclose)
            if way == "asked" or not cancel.has_begun:
                await scheduler.aclose()
