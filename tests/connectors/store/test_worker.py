"""Engines that share a store of prompts, and never each other's address."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import threading
import time
import types
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Literal

import msgspec
import pytest
import torch

from asynckv.abc import (
    KVConnectorStep,
    KVRequest,
    KVScheduled,
    KVTransferResults,
    StoreTier,
)
from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.config import KVRole, KVTransferConfig
from asynckv.connectors.engine import (
    SHAPE_KEY,
    KVEngine,
    namespace_of,
    prefix_block_keys,
    rank_block_keys,
)
from asynckv.connectors.requests import StoreMetadata, StorePart, StoreRequest
from asynckv.connectors.store import worker as store_saving
from asynckv.connectors.store.scheduler import StoreScheduler
from asynckv.connectors.store.worker import (
    StoreRank,
    StoreWorker,
    StoreWorkerStatistics,
)
from asynckv.errors import ConfigError, EntryTooLarge, GPUFailed, PeerLost
from asynckv.stores.tiered import TieredStore
from asynckv.testing.blocked import until
from harness.engines.toy_engine import ToyEngine
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import make_engine, toy_shape
from harness.tiers import DictTier

MODEL = ToyModel()
BLOCK_NBYTES = 4 * 2 * 16 * 4 * 8 * 4
"""Layers, keys and values, tokens, heads, and four bytes of each dimension."""

NAMES = itertools.count()


def prompt(length: int = 70) -> list[int]:
    chance = random.Random(length)
    return [chance.randrange(50_000) for _ in range(length)]


def config_of(
    url: str, chunk_tokens: int, policy: Literal["recompute", "fail"] = "recompute"
) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="StoreConnector",
        kv_role="kv_both",
        kv_load_failure_policy=policy,
        kv_connector_extra_config={
            "store": url,
            "fingerprint": "toy",
            "chunk_tokens": chunk_tokens,
        },
    )


@asynccontextmanager
async def engines_of(
    tp_size: int = 1,
    max_bytes: str = "16MiB",
    *,
    policy: Literal["recompute", "fail"] = "recompute",
    tiers: Sequence[StoreTier] = (),
    chunk_tokens: int = 16,
) -> AsyncIterator[tuple[ToyEngine, ToyEngine, TieredStore]]:
    url = f"mem://store{next(NAMES)}"
    config = config_of(url, chunk_tokens, policy)
    shape = toy_shape(MODEL, tp_size=tp_size)
    async with (
        TieredStore(max_bytes, tiers, fingerprint="toy") as store,
        serve(url, store=store),
        make_engine("one", config, shape, MODEL, chunk=32) as one,
        make_engine("two", config, shape, MODEL) as two,
    ):
        yield one, two, store


async def fill(store: TieredStore) -> None:
    """Put so much that memory drops all that it may, and no tier keeps that."""
    for number in range(40):
        await store.put(f"filler {number}", torch.zeros(2**15, dtype=torch.uint8))
    await store.flush()
    for number in range(40):
        await store.delete(f"filler {number}")


async def stored_by(engine: ToyEngine, tokens: list[int] | None = None) -> list[int]:
    """Return a prompt whose blocks it has stored."""
    tokens = tokens or prompt()
    first = await engine.generate(tokens, 2, request_id="a")
    assert first.tokens == MODEL.generate(tokens, 2)
    assert first.external_tokens == 0
    for worker in engine.workers:
        assert isinstance(worker, StoreWorker)
        await worker.flush()
    return tokens


async def loaded_by(engine: ToyEngine, tokens: list[int]) -> int:
    """Return how many tokens were not computed; what follows them is right."""
    output = await engine.generate(tokens, 2, request_id="b")
    assert output.tokens == MODEL.generate(tokens, 2)
    await engine.quiet()
    return output.external_tokens


@pytest.mark.parametrize("tp_size", [1, 2])
async def test_a_prompt_that_one_engine_computed_another_loads(tp_size: int) -> None:
    async with engines_of(tp_size) as (one, two, _):
        tokens = await stored_by(one)
        assert await loaded_by(two, [*tokens[:50], *prompt(20)]) == 48


@pytest.mark.parametrize(
    ("tp_size", "chunk_tokens", "stored", "cached"),
    [
        (1, 16, 592, 0),
        (2, 16, 592, 511),
        (1, 32, 576, 48),
        (2, 32, 576, 272),
        (2, 256, 512, 0),
        (1, 256, 512, 48),
        (1, 256, 512, 272),
        (2, 256, 512, 511),
    ],
)
async def test_all_that_is_stored_is_loaded_though_the_engine_has_a_part_of_a_chunk(
    tp_size: int, chunk_tokens: int, stored: int, cached: int
) -> None:
    tokens = prompt(600)
    async with engines_of(tp_size, "64MiB", chunk_tokens=chunk_tokens) as engines:
        one, two, _ = engines
        await stored_by(one, tokens)
        output = await two.generate(tokens, 2, request_id="b", cached_tokens=cached)
        assert output.tokens == MODEL.generate(tokens, 2)
        assert output.external_tokens == stored - cached
        await two.quiet()
        assert not two.failures


@pytest.mark.parametrize("other", [16, 64, 256])
async def test_chunks_of_another_size_are_not_found_and_it_is_said_why(
    other: int,
) -> None:
    tokens = prompt(300)
    url = f"mem://sizes{next(NAMES)}"
    shape, configs = toy_shape(MODEL), [config_of(url, size) for size in (32, other)]
    async with (
        StoreBuffer("64MiB", fingerprint="toy") as store,
        serve(url, store=store),
        make_engine("one", configs[0], shape, MODEL) as one,
        make_engine("two", configs[1], shape, MODEL) as two,
    ):
        await stored_by(one, tokens)
        assert await loaded_by(two, tokens) == 0
        scheduler = two.scheduler
        assert isinstance(scheduler, StoreScheduler)
        said = scheduler.statistics().refused
        assert said == f"chunk_tokens=32 there and {other} here"
        for worker in two.workers:
            assert isinstance(worker, StoreWorker)
            await worker.flush()
        # Beside each other both find their own.
        assert await loaded_by(one, tokens) == 288
        assert await loaded_by(two, tokens) == 300 // other * other


async def test_how_an_engine_cuts_values_is_said_again_after_a_store_was_cleared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    later_s = 0.0
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + later_s)
    monkeypatch.setattr(store_saving, "time", clock)
    async with engines_of() as (one, _, store):
        for later_s, is_said in ((0.0, True), (0.0, False), (60.0, True)):
            await stored_by(one, prompt(70 + int(later_s) + is_said))
            assert await store.contains([SHAPE_KEY]) == (is_said,)
            await store.clear()


async def test_blocks_that_were_dropped_meanwhile_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with engines_of() as (one, two, store):
        tokens, (pinned,) = await stored_by(one), two.workers
        assert isinstance(pinned, StoreWorker)
        start_load_kv = pinned.start_load_kv

        async def start_late(context: object = None, **kwargs: object) -> None:
            orders = pinned._step
            for order in orders.loads if isinstance(orders, StoreMetadata) else ():
                for key in order.keys[:1]:
                    await store.delete(f"{key}/{namespace_of(pinned.engine)}/0")
            await start_load_kv(context, **kwargs)

        monkeypatch.setattr(pinned, "start_load_kv", start_late)
        await loaded_by(two, tokens)
        assert "not stored any more" in two.failures["b"]


@pytest.mark.parametrize("tp_size", [1, 2])
async def test_what_an_engine_was_promised_is_there_though_every_tier_drops_it(
    tp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DictTier()
    async with engines_of(tp_size, "1MiB", policy="fail", tiers=[tier]) as engines:
        one, two, store = engines
        tokens = await stored_by(one)
        await fill(store)  # only the tier has them then
        worker = two.workers[0]
        assert isinstance(worker, StoreWorker)
        start_load_kv = worker.start_load_kv

        async def start_late(context: object = None, **kwargs: object) -> None:
            if isinstance(worker._step, StoreMetadata) and worker._step.loads:
                tier.values.clear()
                for _ in range(2):  # what is let go of in between, too
                    await fill(store)
            await start_load_kv(context, **kwargs)

        monkeypatch.setattr(worker, "start_load_kv", start_late)
        assert await loaded_by(two, tokens) == 64
        assert not two.failures


async def test_a_store_that_goes_away_stops_no_engine() -> None:
    async with engines_of() as (one, two, store):
        tokens = await stored_by(one)
        await store.aclose()
        assert await loaded_by(two, tokens) == 0


async def test_what_was_loaded_and_saved_is_counted_in_bytes_of_whole_blocks() -> None:
    async with engines_of() as (one, two, _):
        await loaded_by(two, await stored_by(one))
        saved, loaded = (each.workers[0].statistics() for each in (one, two))
    assert isinstance(saved, StoreWorkerStatistics)
    assert isinstance(loaded, StoreWorkerStatistics)
    assert saved.saved_blocks == loaded.loaded_blocks == 4
    assert saved.saved_bytes == loaded.loaded_bytes
    assert 0 <= loaded.loaded_bytes - 4 * BLOCK_NBYTES < 1024  # each has a mark


BY_BLOCK: dict[str, object] = {"chunk_tokens": 16}
CONFIG = KVTransferConfig(kv_role="kv_both", kv_connector_extra_config=BY_BLOCK)
ENGINE = KVEngine(engine_id="E", block_size=16)


async def test_a_load_that_cannot_begin_has_failed_and_says_why() -> None:
    order = StoreRequest("r", ("key",), ((3,),))
    async with StoreBuffer() as store, StoreWorker(CONFIG, ENGINE, store) as worker:
        worker.bind_connector_metadata(StoreMetadata(loads=(order,)))
        await worker.start_load_kv()
        results = worker.get_finished()
    assert results.failed_recving == {"r"} and results.invalid_block_ids == {3}
    assert "register_kv_caches() comes first" in results.reasons["r"]


async def test_a_load_that_is_refused_has_failed_for_that_reason() -> None:
    order = StoreRequest("r", ("key",), ((3,), ()), refusal="a group has 0 blocks")
    async with StoreBuffer() as store, StoreWorker(CONFIG, ENGINE, store) as worker:
        worker.register_kv_caches({"a": torch.zeros(4, 16, 2)})
        worker.bind_connector_metadata(StoreMetadata(loads=(order,)))
        await worker.start_load_kv()
        assert worker.get_finished().reasons == {"r": "a group has 0 blocks"}


async def load(worker: StoreWorker, *keys: str) -> KVTransferResults:
    order = StoreRequest("r", keys, (tuple(range(len(keys))),))
    worker.bind_connector_metadata(StoreMetadata(loads=(order,)))
    await worker.start_load_kv()
    await until(lambda: not worker.statistics().loading)
    return worker.get_finished()


async def test_a_load_that_lacks_a_block_reads_none_and_says_how_many() -> None:
    async with StoreBuffer() as store, StoreWorker(CONFIG, ENGINE, store) as worker:
        worker.register_kv_caches({"a": torch.zeros(4, 16, 2)})
        order = StoreRequest("s", ("one",), ((3,),))
        worker.bind_connector_metadata(StoreMetadata(saves=(order,)))
        await worker.wait_for_save()
        await worker.flush()
        results = await load(worker, "one", "two", "three")
        assert results.failed_recving == {"r"}
        assert "2 of 3 values are not stored" in results.reasons["r"]
        assert worker.statistics().loaded_blocks == 0
        assert not (await load(worker, "one")).failed_recving
        statistics = worker.statistics()
        assert (statistics.saved_blocks, statistics.loaded_blocks) == (1, 1)
        assert statistics.loaded_bytes == statistics.saved_bytes >= 128


async def test_of_a_chunk_only_the_blocks_that_are_wanted_are_written() -> None:
    extra: dict[str, object] = {"chunk_tokens": 64}
    config = KVTransferConfig(kv_connector_extra_config=extra)
    async with StoreBuffer() as store, StoreWorker(config, ENGINE, store) as worker:
        cache = torch.randn(16, 64)
        before = cache.clone()
        worker.register_kv_caches({"a": cache})
        order = StoreRequest("s", ("one", "two"), ((9, 2, 7, 4, 1, 0, 3, 5),))
        worker.bind_connector_metadata(StoreMetadata(saves=(order,)))
        await worker.wait_for_save()
        await worker.flush()
        order = StoreRequest("r", ("one", "two"), ((15, 8, 10, 11, 12),), 3)
        worker.bind_connector_metadata(StoreMetadata(loads=(order,)))
        await worker.start_load_kv()
        await until(lambda: not worker.statistics().loading)
        assert not worker.get_finished().failed_recving
        before[[15, 8, 10, 11, 12]] = before[[4, 1, 0, 3, 5]]
        assert torch.equal(cache, before)
        statistics = worker.statistics()
        assert (statistics.saved_blocks, statistics.loaded_blocks) == (8, 5)
        assert statistics.loaded_bytes == statistics.saved_bytes


async def test_a_load_of_other_blocks_than_its_values_have_fails() -> None:
    async with StoreBuffer() as store, StoreWorker(CONFIG, ENGINE, store) as worker:
        worker.register_kv_caches({"a": torch.zeros(4, 16, 2)})
        order = StoreRequest("r", ("one",), ((1, 2),))
        worker.bind_connector_metadata(StoreMetadata(loads=(order,)))
        await worker.start_load_kv()
        await until(lambda: not worker.statistics().loading)
        assert "1 values have 1 blocks" in worker.get_finished().reasons["r"]


@pytest.mark.parametrize("max_bytes", [64 + 4 * 1024, 64 + 4 * 1024 - 1])
async def test_chunks_that_could_not_be_received_are_refused_with_the_caches(
    max_bytes: int,
) -> None:
    extra: dict[str, object] = {"chunk_tokens": 64}
    config = KVTransferConfig(kv_buffer_size=max_bytes, kv_connector_extra_config=extra)
    refused = pytest.raises(ConfigError, match="64 tokens takes 4160 bytes")
    async with StoreBuffer() as store, StoreWorker(config, ENGINE, store) as worker:
        with refused if max_bytes < 4160 else contextlib.nullcontext() as caught:
            worker.register_kv_caches({"a": torch.zeros(8, 256)})
    assert caught is None or "make chunk_tokens smaller" in caught.value.hint


class CountingStore(StoreBuffer):
    """Knows how many values are got at once."""

    now = most = 0

    async def get(
        self, key: str, into: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0)
            return await super().get(key, into)
        finally:
            self.now -= 1


@pytest.mark.parametrize(("blocks", "at_once"), [(1, 16), (2, 8), (4, 4), (16, 4)])
async def test_fewer_values_are_loaded_at_once_the_larger_they_are(
    blocks: int, at_once: int
) -> None:
    config = KVTransferConfig(kv_connector_extra_config={"chunk_tokens": 16 * blocks})
    keys, ids = tuple(f"{n}" for n in range(20)), tuple(range(20 * blocks))
    order = StoreRequest("r", keys, (ids,))
    async with CountingStore() as store, StoreWorker(config, ENGINE, store) as worker:
        worker.register_kv_caches({"a": torch.zeros(20 * blocks, 16)})
        worker.bind_connector_metadata(StoreMetadata(saves=(order,)))
        await worker.wait_for_save()
        await worker.flush()
        worker.bind_connector_metadata(StoreMetadata(loads=(order,)))
        await worker.start_load_kv()
        await until(lambda: not worker.statistics().loading)
        assert not worker.get_finished().failed_recving
        assert store.most == at_once


BLOCKS = tuple(range(100))


class GatedStore(StoreBuffer):
    """One that gives values when its gate is open, and knows who asks for which."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.asked: list[str] = []
        self.most_tasks = 0

    async def get(
        self, key: str, into: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        self.asked.append(key[0])
        self.most_tasks = max(self.most_tasks, len(asyncio.all_tasks()))
        await self.gate.wait()
        return await super().get(key, into)


@asynccontextmanager
async def loading_at_once(*names: str) -> AsyncIterator[tuple[GatedStore, StoreWorker]]:
    """Begin loads of 100 values each, of which the store gives none yet."""
    async with GatedStore() as store, StoreWorker(CONFIG, ENGINE, store) as worker:
        worker.register_kv_caches({"a": torch.zeros(100, 16)})
        orders = tuple(
            StoreRequest(name, tuple(f"{name}{n}" for n in range(100)), (BLOCKS,))
            for name in names
        )
        for order in orders:
            worker.bind_connector_metadata(StoreMetadata(saves=(order,)))
            await worker.wait_for_save()
            await worker.flush()
        worker.bind_connector_metadata(StoreMetadata(loads=orders))
        await worker.start_load_kv()
        await until(lambda: len(store.asked) == 16)
        yield store, worker


async def test_of_a_long_load_no_more_tasks_are_begun_than_may_run_at_once() -> None:
    before = len(asyncio.all_tasks())
    async with loading_at_once("r") as (store, worker):
        store.gate.set()
        await until(lambda: not worker.statistics().loading)
        assert not worker.get_finished().failed_recving
        assert len(store.asked) == 100
        assert store.most_tasks < before + 40


async def test_the_values_of_one_load_come_before_those_of_the_next() -> None:
    async with loading_at_once("r", "s") as (store, worker):
        store.gate.set()
        await until(lambda: not worker.statistics().loading)
        assert worker.get_finished().finished_recving == {"r", "s"}
        assert "".join(store.asked) == 100 * "r" + 100 * "s"


async def test_a_load_that_is_aborted_as_it_begins_lets_the_next_one_begin() -> None:
    async with loading_at_once("r", "s") as (store, worker):
        worker.bind_connector_metadata(StoreMetadata(aborts=("r",)))
        await worker.start_load_kv()
        store.gate.set()
        await until(lambda: not worker.statistics().loading)
        results = worker.get_finished()
        assert results.finished_recving == {"r", "s"}
        assert results.failed_recving == {"r"}
        assert store.asked.count("s") == 100


class SlowStore(StoreBuffer):
    """One that stores blocks when its gate is open, and some never."""

    def __init__(self) -> None:
        super().__init__("16MiB")
        self.gate = asyncio.Event()
        self.refused = ""
        self.error: Exception = OSError("no room")

    async def put(
        self,
        key: str,
        value: torch.Tensor | None,
        *,
        ttl_s: float | None = None,
        pin: bool = False,
    ) -> None:
        await self.gate.wait()
        await asyncio.sleep(0)
        if self.refused and key.startswith(self.refused):
            raise self.error
        await super().put(key, value, ttl_s=ttl_s, pin=pin)


class WatchedStore(StoreBuffer):
    """Knows which threads free the values that it is given, and gives."""

    def __init__(self) -> None:
        super().__init__("64MiB")
        self.freed_by: list[int] = []

    async def put(
        self,
        key: str,
        value: torch.Tensor | None,
        *,
        ttl_s: float | None = None,
        pin: bool = False,
    ) -> None:
        self._watch(value)
        await super().put(key, value, ttl_s=ttl_s, pin=pin)

    async def get(
        self, key: str, into: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        return self._watch(await super().get(key, into))

    def _watch(self, value: torch.Tensor | None) -> torch.Tensor | None:
        if value is not None and value.nbytes > 2**20:
            note = self.freed_by.append
            weakref.finalize(value, lambda: note(threading.get_ident()))
        return value


async def test_megabytes_that_were_saved_or_loaded_are_not_freed_on_the_loop() -> None:
    order = StoreRequest("s", ("one",), ((0,),))
    async with WatchedStore() as store, StoreWorker(CONFIG, ENGINE, store) as worker:
        worker.register_kv_caches({"a": torch.zeros(2, 2**20)})
        worker.bind_connector_metadata(StoreMetadata(saves=(order,)))
        await worker.wait_for_save()
        await worker.flush()
        assert not (await load(worker, "one")).failed_recving
        await until(lambda: len(store.freed_by) == 2)
        assert threading.get_ident() not in store.freed_by


@asynccontextmanager
async def saving_to(
    store: SlowStore, role: KVRole = "kv_both", chunk_tokens: int = 16
) -> AsyncIterator[StoreWorker]:
    config = KVTransferConfig(
        kv_role=role, kv_connector_extra_config={"chunk_tokens": chunk_tokens}
    )
    worker = StoreWorker(config, KVEngine(engine_id="E", block_size=16), store)
    worker.register_kv_caches({"layer": torch.ones(16, 64)})
    async with store, worker:
        yield worker


async def save(worker: StoreWorker, name: str, first: int, end: int) -> None:
    """Save these blocks of a prompt."""
    keys = tuple(f"{name}{number}" for number in range(first, end))
    order = StoreRequest(name, keys, (tuple(range(first, end)),), first)
    worker.bind_connector_metadata(StoreMetadata(saves=(order,)))
    await worker.wait_for_save()
    worker.clear_connector_metadata()


async def store_all(worker: StoreWorker, name: str, first: int, end: int) -> list[bool]:
    """Save them and wait; say of all blocks of the prompt whether they are stored."""
    await save(worker, name, first, end)
    await worker.flush()
    return await stored(worker, name, end)


async def stored(worker: StoreWorker, name: str, end: int) -> list[bool]:
    store = await worker._line.store()
    keys = [f"{name}{number}" for number in range(end)]
    namespace = namespace_of(worker.engine)
    return list(await store.contains(rank_block_keys(keys, namespace, 0)))


@pytest.fixture
def two_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_saving, "_STAGED_BLOCKS", 2)
    monkeypatch.setattr(store_saving, "_STAGED_BYTES", 1)


@pytest.mark.usefixtures("two_at_once")
async def test_of_a_long_prompt_all_is_stored_if_the_store_goes_on() -> None:
    store = SlowStore()
    store.gate.set()
    async with saving_to(store) as worker:
        assert await store_all(worker, "r", 0, 12) == [True] * 12
        assert worker.statistics().skipped_blocks == 0


@pytest.mark.usefixtures("two_at_once")
async def test_blocks_that_cannot_be_copied_take_no_room() -> None:
    store = SlowStore()
    store.gate.set()
    async with saving_to(store) as worker:
        for _ in range(2):
            with pytest.raises(IndexError, match="no such id"):
                await save(worker, "r", 16, 17)
        assert await store_all(worker, "s", 0, 1) == [True]


@pytest.mark.parametrize("fails", ["the first save", "the mark of the stream"])
async def test_with_a_save_that_fails_its_step_s_others_have_failed(fails: str) -> None:
    store, is_lost = SlowStore(), fails != "the first save"
    store.gate.set()
    first = StoreRequest("q", ("q0",), ((3 if is_lost else 16,),))
    saves = first, StoreRequest("r", ("r0",), ((0,),))
    async with saving_to(store) as worker:
        worker.bind_connector_metadata(StoreMetadata(saves=saves))
        worker.follow(GPUFailed("an illegal access") if is_lost else None)
        with pytest.raises((IndexError, GPUFailed)):
            await worker.wait_for_save()
        worker.follow(None)
        assert worker.statistics().unsaved_blocks == 2
        assert await store_all(worker, "r", 1, 3) == [False] * 3  # behind a gap
        assert await store_all(worker, "r", 0, 3) == [True] * 3


@pytest.mark.parametrize(("blocks", "most"), [(1, 12), (2, 12), (4, 12), (16, 1)])
async def test_so_many_blocks_or_one_value_are_on_their_way_at_the_most(
    blocks: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_saving, "_STAGED_BLOCKS", 12)
    monkeypatch.setattr(store_saving, "_STAGED_BYTES", 1)
    monkeypatch.setattr(store_saving, "_WAIT_S", 0.001)
    store, keys = SlowStore(), tuple(f"{number}" for number in range(20))
    ids = tuple(number % 16 for number in range(20 * blocks))
    async with saving_to(store, chunk_tokens=16 * blocks) as worker:
        order = StoreRequest("r", keys, (ids,))
        worker.bind_connector_metadata(StoreMetadata(saves=(order,)))
        await worker.wait_for_save()
        on_their_way = max(1, most // blocks)
        assert worker.statistics().saving == on_their_way
        assert worker.statistics().skipped_blocks == (20 - on_their_way) * blocks
        store.gate.set()
        await worker.flush()
        assert worker.statistics().saved_blocks == on_their_way * blocks


async def test_that_values_are_too_large_for_the_store_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = SlowStore()
    store.gate.set()
    store.refused, store.error = "r", EntryTooLarge("9 bytes", nbytes=9)
    async with saving_to(store) as worker:
        assert await store_all(worker, "r", 0, 3) == [False] * 3
        await store_all(worker, "ra", 0, 1)
        assert worker.statistics().unsaved_blocks == 4
    (line,) = caplog.messages
    assert "9 bytes" in line and "a smaller chunk_tokens" in line


@pytest.mark.usefixtures("two_at_once")
async def test_nothing_is_stored_behind_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_saving, "_WAIT_S", 0.001)
    store = SlowStore()
    async with saving_to(store) as worker:
        await save(worker, "r", 0, 5)
        assert worker.statistics().skipped_blocks == 3
        # It is not waited for again before it has stored something.
        monkeypatch.setattr(store_saving, "_WAIT_S", 3600)
        await save(worker, "s", 0, 1)
        store.gate.set()
        await worker.flush()
        stored = await store_all(worker, "r", 5, 7)
        assert stored == [True] * 2 + [False] * 5
        assert worker.statistics().skipped_blocks == 6
        # Begun again from there, or before, it is stored.
        assert await store_all(worker, "r", 2, 7) == [True] * 7


async def test_a_load_waits_for_no_save() -> None:
    """A save may wait for room that only a load gives back."""
    store = SlowStore()
    store.gate.set()
    async with saving_to(store) as worker:
        await store_all(worker, "r", 0, 1)
        store.gate.clear()
        await save(worker, "s", 0, 16)
        assert not (await load(worker, "r0")).failed_recving
        assert worker.statistics().saving == 16
        store.gate.set()
        await worker.flush()


async def test_a_step_s_saves_are_made_when_they_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, own = list[StorePart](), StoreRank._own

    def note(rank: StoreRank, part: StorePart) -> StorePart:
        made.append(part)
        return own(rank, part)

    monkeypatch.setattr(StoreRank, "_own", note)
    store = SlowStore()
    store.gate.set()
    async with saving_to(store) as worker:
        order = StoreRequest("r", ("r0", "r1"), ((0, 1),))
        worker.bind_connector_metadata(StoreMetadata(saves=(order,)))
        assert not made
        await worker.wait_for_save()
        assert [part.number for part in made] == [0, 1]
        await worker.flush()


async def test_nothing_follows_a_block_that_could_not_be_stored() -> None:
    store = SlowStore()
    store.gate.set()
    store.refused = "r1/"
    async with saving_to(store) as worker:
        await store_all(worker, "r", 0, 2)
        assert await store_all(worker, "r", 2, 4) == [True, False, False, False]


async def test_a_gap_is_that_of_its_request_and_of_none_that_has_its_id_later() -> None:
    store = SlowStore()
    store.gate.set()
    async with saving_to(store) as worker:
        scheduler = StoreScheduler(CONFIG, worker.engine, store)

        async def step(request: KVRequest, found: int) -> bool:
            """Save what was not found; say whether its first block is stored."""
            scheduler.on_new_request(request)
            (question,) = scheduler.take_questions()
            scheduler.take_answer(question.answered(found))
            scheduled = KVScheduled(
                "r", (tuple(range(4)),), 16 * found, 64 - 16 * found
            )
            told = scheduler.build_connector_meta(KVConnectorStep((scheduled,)))
            worker.bind_connector_metadata(told)
            await worker.wait_for_save()
            await worker.flush()
            scheduler.request_finished(request, ((),))
            keys = rank_block_keys(question.keys, namespace_of(worker.engine), 0)
            return all(await store.contains(keys[found : found + 1]))

        store.refused = prefix_block_keys(prompt(64), 16)[1]
        assert not await step(KVRequest("r", tuple(prompt(64))), 1)
        assert await step(KVRequest("r", tuple(prompt(65)[:64])), 2)


async def test_blocks_that_take_long_to_copy_are_saved_though_their_step_is_over() -> (
    None
):
    engine = KVEngine(engine_id="E", block_size=16)
    order = StoreRequest("r", ("one", "two", "three"), ((1, 2, 3),))
    async with StoreBuffer("16MiB") as store:
        worker = StoreWorker(CONFIG, engine, store)
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


@pytest.mark.parametrize(("role", "lines"), [("kv_producer", 2), ("kv_both", 0)])
async def test_who_never_looks_up_says_once_that_the_store_is_lost_and_is_back(
    role: KVRole, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "asynckv.connectors")
    async with saving_to(SlowStore(), role) as worker:
        store = await worker._line.store()
        assert isinstance(store, SlowStore)
        store.gate.set()
        store.refused, store.error = "asynckv", PeerLost("it is gone")
        for name in "ab":
            await store_all(worker, name, 0, 2)
        store.refused = ""
        await store_all(worker, "c", 0, 2)
    said = [line for line in caplog.messages if "the store" in line]
    assert len(said) == lines
    assert not said or ("it is gone" in said[0] and "answers again" in said[1])


RANKS = KVEngine(engine_id="E", block_size=16, tp_size=2)


async def rank_of(engine: KVEngine) -> StoreRank:
    async with StoreBuffer() as store, StoreWorker(CONFIG, engine, store) as worker:
        rank = worker._loading._rank
        assert worker._saving._rank is rank
        return rank


async def test_each_rank_has_its_own_keys_of_a_block() -> None:
    order, name = StoreRequest("r", ("a", "b"), ((3, 4),)), namespace_of(RANKS)
    for number in range(2):
        rank = await rank_of(msgspec.structs.replace(RANKS, rank=number))
        keys = [part.key for part in rank.parts_of(order)]
        assert keys == await rank.keys_of(order)
        assert keys == [f"a/{name}/{number}", f"b/{name}/{number}"]


async def test_what_values_have_of_a_long_request_is_made_one_by_one() -> None:
    rank, order = await rank_of(RANKS), StoreRequest("r", ("a", "b"), ((3, 4),))
    parts = rank.parts_of(order)
    assert [next(parts).block_ids, next(parts).block_ids] == [((3,),), ((4,),)]


async def test_ranks_of_another_shape_have_no_key_in_common() -> None:
    order = StoreRequest("r", ("a",), ((3,),))
    one, other = [
        await rank_of(msgspec.structs.replace(RANKS, tp_size=size)) for size in (1, 2)
    ]
    assert list(one.parts_of(order)) != list(other.parts_of(order))
