"""Engines that share a store of prompts, and never each other's address."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.config import KVTransferConfig
from asynckv.connectors import store_worker
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.store_orders import StoreMetadata, StoreOrder
from asynckv.connectors.store_worker import StoreWorker
from asynckv.testing.engines.toy_engine import ToyEngine
from asynckv.testing.engines.toy_model import ToyModel
from asynckv.testing.engines.toy_pairs import make_engine, toy_shape

MODEL = ToyModel()
NAMES = itertools.count()


def prompt(length: int = 70) -> list[int]:
    chance = random.Random(length)
    return [chance.randrange(50_000) for _ in range(length)]


@asynccontextmanager
async def engines_of(
    tp_size: int = 1, max_bytes: str = "16MiB"
) -> AsyncIterator[tuple[ToyEngine, ToyEngine, StoreBuffer]]:
    url = f"mem://store{next(NAMES)}"
    config = KVTransferConfig(
        kv_connector="StoreConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"store": url, "fingerprint": "toy"},
    )
    shape = toy_shape(MODEL, tp_size=tp_size)
    async with (
        StoreBuffer(max_bytes, fingerprint="toy") as store,
        serve(url, store=store),
        make_engine("one", config, shape, MODEL, chunk=32) as one,
        make_engine("two", config, shape, MODEL) as two,
    ):
        yield one, two, store


async def flush(engine: ToyEngine) -> None:
    for worker in engine.workers:
        assert isinstance(worker, StoreWorker)
        await worker.flush()


async def test_a_prompt_that_one_engine_computed_another_loads() -> None:
    for tp_size in (1, 2):
        async with engines_of(tp_size) as (one, two, _):
            tokens = prompt()
            first = await one.generate(tokens, 2, request_id="a")
            assert (first.tokens, first.external_tokens) == (
                MODEL.generate(tokens, 2),
                0,
            )
            await flush(one)
            longer = [*tokens[:50], *prompt(20)]
            again = await two.generate(longer, 2, request_id="b")
            assert again.tokens == MODEL.generate(longer, 2)
            assert again.external_tokens == 48
            await two.quiet()


async def test_blocks_that_were_dropped_meanwhile_are_computed() -> None:
    async with engines_of() as (one, two, store):
        tokens = prompt()
        await one.generate(tokens, request_id="a")
        await flush(one)
        pinned = two.workers[0]
        assert isinstance(pinned, StoreWorker)
        start_load_kv = pinned.start_load_kv

        async def start_late(context: object = None, **kwargs: object) -> None:
            orders = pinned._orders
            for order in orders.loads if orders is not None else ():
                for key in order.block_keys[:1]:
                    await store.delete(f"{key}/{pinned._namespace}/0")
            await start_load_kv(context, **kwargs)

        pinned.start_load_kv = start_late  # type: ignore[method-assign]
        again = await two.generate(tokens, 2, request_id="b")
        assert again.tokens == MODEL.generate(tokens, 2)
        assert "not stored any more" in two.failures["b"]
        await two.quiet()


async def test_a_store_that_goes_away_stops_no_engine() -> None:
    async with engines_of() as (one, two, store):
        tokens = prompt()
        await one.generate(tokens, request_id="a")
        await flush(one)
        await store.aclose()
        again = await two.generate(tokens, 2, request_id="b")
        assert again.tokens == MODEL.generate(tokens, 2)
        assert again.external_tokens == 0


async def test_blocks_that_take_long_to_copy_are_saved_though_their_step_is_over() -> (
    None
):
    engine = KVEngine(engine_id="E", block_size=4)
    order = StoreOrder("r", ("one", "two", "three"), ((1, 2, 3),))
    async with StoreBuffer("16MiB") as store:
        worker = StoreWorker(KVTransferConfig(kv_role="kv_both"), engine, store)
        worker.register_kv_caches({"layer": torch.ones(8, 65536)})
        async with worker:
            worker.bind_connector_metadata(StoreMetadata(saves=(order,)))
            saving = asyncio.create_task(worker.wait_for_save())
            await asyncio.sleep(0)
            worker.clear_connector_metadata()
            worker.bind_connector_metadata(StoreMetadata())
            await saving
            await worker.flush()
            assert worker.statistics().saved_blocks == 3
            digest_nbytes = 64
            nbytes = 3 * (4 * 65536 + digest_nbytes)
            assert worker.statistics().saved_bytes == nbytes
            await store.aclose()
            worker.bind_connector_metadata(StoreMetadata(saves=(order,)))
            await worker.wait_for_save()
            await worker.flush()
            assert worker.statistics().unsaved_blocks == 3


class SlowStore(StoreBuffer):
    """One that stores blocks when its gate is open, and some never."""

    def __init__(self) -> None:
        super().__init__("16MiB")
        self.gate = asyncio.Event()
        self.refused = ""

    async def put(self, key: str, value: torch.Tensor | None) -> None:
        await self.gate.wait()
        await asyncio.sleep(0)
        if self.refused and key.startswith(self.refused):
            raise OSError("no room")
        await super().put(key, value)


@asynccontextmanager
async def saving_to(store: SlowStore) -> AsyncIterator[StoreWorker]:
    config = KVTransferConfig(kv_role="kv_both")
    worker = StoreWorker(config, KVEngine(engine_id="E", block_size=16), store)
    worker.register_kv_caches({"layer": torch.ones(16, 64)})
    async with store, worker:
        yield worker


async def save(worker: StoreWorker, name: str, first: int, end: int) -> list[bool]:
    """Save these blocks of a prompt; say of all its blocks whether they are stored."""
    keys = tuple(f"{name}{number}" for number in range(first, end))
    order = StoreOrder(name, keys, (tuple(range(first, end)),), first)
    worker.bind_connector_metadata(StoreMetadata(saves=(order,)))
    await worker.wait_for_save()
    worker.clear_connector_metadata()
    return await stored(worker, name, end)


async def stored(worker: StoreWorker, name: str, end: int) -> list[bool]:
    store = await worker._line.store()
    whole = StoreOrder(name, tuple(f"{name}{number}" for number in range(end)), ((),))
    return list(await store.contains(worker._keys_of(whole)))


@pytest.fixture
def two_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_worker, "_STAGED_BLOCKS", 2)
    monkeypatch.setattr(store_worker, "_STAGED_BYTES", 1)


@pytest.mark.usefixtures("two_at_once")
async def test_of_a_long_prompt_all_is_stored_if_the_store_goes_on() -> None:
    store = SlowStore()
    store.gate.set()
    async with saving_to(store) as worker:
        await save(worker, "r", 0, 12)
        await worker.flush()
        assert await stored(worker, "r", 12) == [True] * 12
        assert worker.statistics().skipped_blocks == 0


@pytest.mark.usefixtures("two_at_once")
async def test_nothing_is_stored_behind_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_worker, "_WAIT_S", 0.001)
    store = SlowStore()
    async with saving_to(store) as worker:
        await save(worker, "r", 0, 5)
        assert worker.statistics().skipped_blocks == 3
        # It is not waited for again before it has stored something.
        monkeypatch.setattr(store_worker, "_WAIT_S", 3600)
        await save(worker, "s", 0, 1)
        store.gate.set()
        await worker.flush()
        await save(worker, "r", 5, 7)
        await worker.flush()
        assert await stored(worker, "r", 7) == [True] * 2 + [False] * 5
        assert worker.statistics().skipped_blocks == 6
        # Begun again from there, or before, it is stored.
        await save(worker, "r", 2, 7)
        await worker.flush()
        assert await stored(worker, "r", 7) == [True] * 7


async def test_nothing_follows_a_block_that_could_not_be_stored() -> None:
    store = SlowStore()
    store.gate.set()
    store.refused = "r1/"
    async with saving_to(store) as worker:
        await save(worker, "r", 0, 2)
        await worker.flush()
        await save(worker, "r", 2, 4)
        await worker.flush()
        assert await stored(worker, "r", 4) == [True, False, False, False]


async def test_an_error_of_a_value_of_the_host_is_left_as_it_is() -> None:
    store = SlowStore()
    store.gate.set()

    async def scatter(value: torch.Tensor) -> None:
        raise ValueError("no block")

    async with saving_to(store) as worker:
        await store.put("other", torch.zeros(8))
        with pytest.raises(ValueError, match="no block") as kept:
            await worker._load_block(store, "other", scatter)
        assert "value" in kept.traceback[-1].locals
