"""What is stored of prompts where a store is slow, or fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from asynckv.buffers.store import StoreBuffer
from asynckv.config import KVRole, KVTransferConfig
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.keys import rank_block_keys
from asynckv.connectors.requests import StoreMetadata, StoreOrder
from asynckv.connectors.store import transfers as store_saving
from asynckv.connectors.store.lookup import namespace_of
from asynckv.connectors.store.worker import StoreWorker
from asynckv.errors import PeerLost


class SlowStore(StoreBuffer):
    """One that stores blocks when its gate is open, and some never."""

    def __init__(self) -> None:
        super().__init__("16MiB")
        self.gate = asyncio.Event()
        self.refused = ""
        self.error: OSError = OSError("no room")

    async def put(self, key: str, value: torch.Tensor | None) -> None:
        await self.gate.wait()
        await asyncio.sleep(0)
        if self.refused and key.startswith(self.refused):
            raise self.error
        await super().put(key, value)


@asynccontextmanager
async def saving_to(
    store: SlowStore, role: KVRole = "kv_both"
) -> AsyncIterator[StoreWorker]:
    config = KVTransferConfig(kv_role=role)
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
        await save(worker, "r", 0, 12)
        await worker.flush()
        assert await stored(worker, "r", 12) == [True] * 12
        assert worker.statistics().skipped_blocks == 0


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
            await save(worker, name, 0, 2)
            await worker.flush()
        store.refused = ""
        await save(worker, "c", 0, 2)
        await worker.flush()
    said = [line for line in caplog.messages if "the store" in line]
    assert len(said) == lines
    assert not said or ("it is gone" in said[0] and "answers again" in said[1])
