from __future__ import annotations

import pytest

from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.config import KVTransferConfig
from asynckv.connectors.connections import StoreConnection
from asynckv.connectors.engine import KVEngine
from asynckv.errors import ConfigError

ENGINE = KVEngine(engine_id="E", block_size=4)


def config_of(**extra: object) -> KVTransferConfig:
    return KVTransferConfig(kv_role="kv_both", kv_connector_extra_config=extra)


async def test_the_configured_store_is_dialled_when_it_is_needed() -> None:
    line = StoreConnection(
        config_of(store="mem://line", fingerprint="toy"), ENGINE, None, "0"
    )
    async with StoreBuffer() as store, serve("mem://line", store=store):
        assert await (await line.store()).contains(["a"]) == (False,)
        await line.aclose()


async def test_a_store_that_is_given_is_used_and_left_open() -> None:
    async with StoreBuffer() as store:
        line = StoreConnection(config_of(), ENGINE, store, "0")
        assert await line.store() is store
        await line.aclose()
        line.abort()
        assert await store.contains([]) == ()


def test_without_a_store_there_is_no_connector() -> None:
    with pytest.raises(ConfigError, match=r"extra_config\.store"):
        StoreConnection(config_of(), ENGINE, None, "0")


def test_a_store_of_blocks_of_nobody_knows_which_model_is_not_used() -> None:
    with pytest.raises(ConfigError, match=r"extra_config\.fingerprint"):
        StoreConnection(config_of(store="mem://line"), ENGINE, None, "0")
