"""A store of prompts, and two engines that use it, where calls are cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec

from asynckv.abc import KVQuestion
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serve import Server, serve
from asynckv.buffers.store import StoreBuffer
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine, prefix_block_keys
from asynckv.connectors.requests import StoreMetadata, StoreRequest
from asynckv.connectors.store.scheduler import StoreScheduler
from asynckv.connectors.store.worker import StoreWorker
from asynckv.testing.blocked import until
from asynckv.testing.expectations import expect
from harness.cancellations.connectors.grounds import (
    SMALL,
    Scheme,
    ToyCaches,
    has_let_go,
    urls_of,
)
from harness.cancellations.grounds import Watched, everything_is_quiet, tasks_now
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import toy_shape
from harness.fake_devices import (
    FakeDevice,
    fake_device_of,
    faultless_gpus,
    lanes_of,
)

__all__ = ("StoreGround", "config_of", "open_store_ground")

_salts: Final = itertools.count()


@dataclasses.dataclass(eq=False)
class StoreGround:
    """``saver`` and ``loader`` are two engines' workers, ``scheduler`` the loader's."""

    url: str
    saver: StoreWorker
    loader: StoreWorker
    scheduler: StoreScheduler
    saved: ToyCaches
    loaded: ToyCaches
    store: StoreBuffer
    lookup: LookupBuffer
    server: Server
    chunk_tokens: int
    gpu: FakeDevice | None = None
    tasks: frozenset[asyncio.Task[Any]] | None = None

    def new_keys(self) -> tuple[str, ...]:
        """Return keys of the prompt that are not stored."""
        salt = f"{next(_salts)}"
        return prefix_block_keys(self.saved.tokens, self.chunk_tokens, salt=salt)

    def begin_save(self, keys: tuple[str, ...]) -> None:
        """Compute the prompt, and hand it over to be saved."""
        self.saved.compute()
        order = StoreRequest("s", keys, (self.saved.block_ids,))
        self.saver.bind_connector_metadata(StoreMetadata(saves=(order,)))

    async def save(self, keys: tuple[str, ...]) -> None:
        """Save it, and wait until it is stored.

        :raises AssertionError: a block is not stored
        """
        self.begin_save(keys)
        await self.end_save(keys)

    async def end_save(self, keys: tuple[str, ...]) -> None:
        """Wait until it is saved, overwrite its blocks, wait until it is stored.

        :raises AssertionError: a block is not stored
        """
        await self.saver.wait_for_save()
        self.saved.spoil()
        self.saver.clear_connector_metadata()
        await self.saver.flush()
        found = (await self.scheduler.ask(KVQuestion("q", keys))).num_keys
        expect(found == len(keys), f"{found} of {len(keys)} values are stored")

    def load_request(self, keys: tuple[str, ...]) -> StoreRequest:
        """Load it all."""
        return StoreRequest("l", keys, (self.loaded.block_ids,))

    async def load(self, keys: tuple[str, ...]) -> None:
        """Load it into caches that hold nothing of it, and look at every byte.

        :raises AssertionError: it failed, or is not what was saved
        """
        self.loaded.spoil()
        orders = StoreMetadata(loads=(self.load_request(keys),))
        self.loader.bind_connector_metadata(orders)
        await self.loader.start_load_kv()
        await until(lambda: not self.loader.statistics().loading)
        results = self.loader.get_finished()
        expect(results.finished_recving == {"l"}, results)
        expect(not results.failed_recving, results.reasons)
        self.loaded.expect_computed()

    async def check_quiet(self) -> None:
        """Wait until nothing is under way, and nothing is stored.

        :raises AssertionError: something is left, and what
        """
        await self.scheduler.finder.holds.release()
        await self.store.clear()
        lines = self.saver._line, self.loader._line, self.scheduler.finder.line
        peers = tuple(
            line._line._peer for line in lines if line._line._peer is not None
        )
        await everything_is_quiet(
            Watched(self.lookup, self.store, self.server, peers, (), self.tasks)
        )
        expect(not self.store.statistics().used_bytes, self.store.statistics())
        for worker in (self.saver, self.loader):
            await has_let_go(worker)

    def new_engine(self) -> KVEngine:
        """Return what is as the loader's, under another name."""
        return msgspec.structs.replace(self.loader.engine, engine_id="loader-2")

    def new_worker(self, config: KVTransferConfig | None = None) -> StoreWorker:
        """Return another loader, of the same caches."""
        worker = _worker(config or self.loader.config, self.new_engine(), self.gpu)
        worker.register_kv_caches(self.loaded.layers)
        return worker


def config_of(
    url: str, *, chunk_tokens: int = 16, **options: object
) -> KVTransferConfig:
    """Return the configuration of an engine that uses the store at ``url``.

    ``options`` are those of connectors.
    """
    named = {"store": url, "fingerprint": "toy", "chunk_tokens": chunk_tokens}
    return KVTransferConfig(
        kv_connector="StoreConnector",
        kv_role="kv_both",
        kv_connector_extra_config={**named, **options},
    )


@contextlib.asynccontextmanager
async def open_store_ground(
    scheme: Scheme,
    model: ToyModel = SMALL,
    *,
    on_gpus: bool = False,
    chunk_tokens: int = 16,
    **options: object,
) -> AsyncIterator[StoreGround]:
    """Open a store and two engines that use it, one of which has loaded once.

    ``on_gpus``: the caches are on a GPU that is not there. ``options`` are those of
    connectors.
    """
    shape = toy_shape(model)
    async with contextlib.AsyncExitStack() as stack:
        gpu: FakeDevice | None = None
        if on_gpus:
            gpus = stack.enter_context(faultless_gpus(1, seed=1, max_delay=2))
            gpu = fake_device_of(gpus.process())
        ((url,),) = stack.enter_context(urls_of(scheme, 1))
        lookup = await stack.enter_async_context(LookupBuffer("1MiB"))
        store = await stack.enter_async_context(StoreBuffer("16MiB", fingerprint="toy"))
        server = await stack.enter_async_context(serve(url, lookup=lookup, store=store))
        config = config_of(url, chunk_tokens=chunk_tokens, **options)
        workers, caches = [], []
        for place, name in enumerate(("saver", "loader")):
            engine = KVEngine(engine_id=name, block_size=16, shape=shape)
            worker = _worker(config, engine, gpu)
            workers.append(await stack.enter_async_context(worker))
            caches.append(ToyCaches(model, shape, 0, place, gpu))
            worker.register_kv_caches(caches[-1].layers)
            await worker.start()
        scheduler = StoreScheduler(config, workers[1].engine)
        await stack.enter_async_context(scheduler)
        ground = StoreGround(
            url,
            saver=workers[0],
            loader=workers[1],
            scheduler=scheduler,
            saved=caches[0],
            loaded=caches[1],
            store=store,
            lookup=lookup,
            server=server,
            chunk_tokens=chunk_tokens,
            gpu=gpu,
        )
        keys = ground.new_keys()
        await ground.save(keys)
        await ground.load(keys)
        await ground.check_quiet()
        ground.tasks = tasks_now()
        yield ground


def _worker(
    config: KVTransferConfig, engine: KVEngine, gpu: FakeDevice | None
) -> StoreWorker:
    if gpu is None:
        return StoreWorker(config, engine)
    return StoreWorker(config, engine, lanes=lanes_of(gpu))
