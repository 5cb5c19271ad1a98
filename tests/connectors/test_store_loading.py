from __future__ import annotations

import pytest
import torch

from asynckv.buffers.store import StoreBuffer
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.store_orders import StoreMetadata, StoreOrder
from asynckv.connectors.store_worker import StoreWorker

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


async def test_an_error_of_a_value_of_the_host_is_left_as_it_is() -> None:
    async def scatter(value: torch.Tensor) -> None:
        raise ValueError("no block")

    async with StoreBuffer() as store, StoreWorker(CONFIG, ENGINE, store) as worker:
        await store.put("other", torch.zeros(8))
        with pytest.raises(ValueError, match="no block") as kept:
            await worker._loading._load_block(store, "other", scatter)
        assert "value" in kept.traceback[-1].locals
