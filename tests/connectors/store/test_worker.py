"""Engines that share a store of prompts, and never each other's address."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.config import KVTransferConfig
from asynckv.connectors.store.lookup import namespace_of
from asynckv.connectors.store.worker import StoreWorker, StoreWorkerStatistics
from harness.engines.toy_engine import ToyEngine
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import make_engine, toy_shape

MODEL = ToyModel()
BLOCK_NBYTES = 4 * 2 * 16 * 4 * 8 * 4
"""Layers, keys and values, tokens, heads, and four bytes of each dimension."""
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
                    await store.delete(f"{key}/{namespace_of(pinned.engine)}/0")
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


async def test_what_was_loaded_and_saved_is_counted_in_bytes_of_whole_blocks() -> None:
    async with engines_of() as (one, two, _):
        await one.generate(prompt(), request_id="a")
        await flush(one)
        await two.generate(prompt(), request_id="b")
        saved, loaded = (each.workers[0].statistics() for each in (one, two))
    assert isinstance(saved, StoreWorkerStatistics)
    assert isinstance(loaded, StoreWorkerStatistics)
    assert saved.saved_blocks == loaded.loaded_blocks == 4
    assert saved.saved_bytes == loaded.loaded_bytes
    assert 0 <= loaded.loaded_bytes - 4 * BLOCK_NBYTES < 1024  # each has a mark
