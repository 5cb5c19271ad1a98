from __future__ import annotations

import torch

from asynckv.abc import KVTransferResults
from asynckv.buffers.store import StoreBuffer
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.requests import StoreMetadata, StoreOrder
from asynckv.connectors.store.worker import StoreWorker
from asynckv.testing.blocked import until

CONFIG = KVTransferConfig(kv_role="kv_both")
ENGINE = KVEngine(engine_id="E", block_size=16)


async def test_a_load_that_cannot_begin_has_failed_and_says_why() -> None:
    order = StoreOrder("r", ("key",), ((3,),))
    async with StoreBuffer() as store, StoreWorker(CONFIG, ENGINE, store) as worker:
        worker.bind_connector_metadata(StoreMetadata(loads=(order,)))
        await worker.start_load_kv()
        results = worker.get_finished()
    assert results.failed_recving == {"r"} and results.invalid_block_ids == {3}
    assert "register_kv_caches() comes first" in results.reasons["r"]


async def load(worker: StoreWorker, *keys: str) -> KVTransferResults:
    order = StoreOrder("r", keys, (tuple(range(len(keys))),))
    worker.bind_connector_metadata(StoreMetadata(loads=(order,)))
    await worker.start_load_kv()
    await until(lambda: not worker.statistics().loading)
    return worker.get_finished()


async def test_a_load_that_lacks_a_block_reads_none_and_says_how_many() -> None:
    async with StoreBuffer() as store, StoreWorker(CONFIG, ENGINE, store) as worker:
        worker.register_kv_caches({"a": torch.zeros(4, 16, 2)})
        order = StoreOrder("s", ("one",), ((3,),))
        worker.bind_connector_metadata(StoreMetadata(saves=(order,)))
        await worker.wait_for_save()
        await worker.flush()
        results = await load(worker, "one", "two", "three")
        assert results.failed_recving == {"r"}
        assert "2 of 3 blocks are not stored" in results.reasons["r"]
        assert worker.statistics().loaded_blocks == 0
        assert not (await load(worker, "one")).failed_recving
        statistics = worker.statistics()
        assert (statistics.saved_blocks, statistics.loaded_blocks) == (1, 1)
        assert statistics.loaded_bytes == statistics.saved_bytes >= 128
