from __future__ import annotations

import msgspec

from asynckv.buffers.store import StoreBuffer
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.requests import StoreOrder
from asynckv.connectors.store.lookup import namespace_of
from asynckv.connectors.store.transfers import StoreRank
from asynckv.connectors.store.worker import StoreWorker

ENGINE = KVEngine(engine_id="E", block_size=16, tp_size=2)


async def rank_of(engine: KVEngine) -> StoreRank:
    config = KVTransferConfig(kv_role="kv_both")
    async with StoreBuffer() as store, StoreWorker(config, engine, store) as worker:
        rank = worker._loading._rank
        assert worker._saving._rank is rank
        return rank


async def test_each_rank_has_its_own_keys_of_a_block() -> None:
    order, name = StoreOrder("r", ("a", "b"), ((3, 4),)), namespace_of(ENGINE)
    for number in range(2):
        rank = await rank_of(msgspec.structs.replace(ENGINE, rank=number))
        assert rank.keys_of(order) == [f"a/{name}/{number}", f"b/{name}/{number}"]


async def test_ranks_of_another_shape_have_no_key_in_common() -> None:
    order = StoreOrder("r", ("a",), ((3,),))
    one, other = [
        await rank_of(msgspec.structs.replace(ENGINE, tp_size=size)) for size in (1, 2)
    ]
    assert one.keys_of(order) != other.keys_of(order)
