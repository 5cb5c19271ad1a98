from __future__ import annotations

import asyncio

from asynckv.config import KVTransferConfig
from asynckv.links.address import parse_url
from asynckv.testing.vllm_engines import free_url, transfer


def test_what_vllm_is_told_is_a_transfer_config_of_ours_too() -> None:
    told = transfer("kv_consumer", "recompute", peers=["tcp://127.0.0.1:1"])
    config = KVTransferConfig(**told)
    assert config.is_kv_consumer
    assert config.kv_connector_extra_config == {"peers": ["tcp://127.0.0.1:1"]}


async def test_at_a_free_url_one_can_listen() -> None:
    address = parse_url(free_url())
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", address.port)
    server.close()
    await server.wait_closed()
