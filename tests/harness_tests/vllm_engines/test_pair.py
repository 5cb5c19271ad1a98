from __future__ import annotations

import asyncio
from typing import Any, Self

import pytest

from asynckv.config import KVTransferConfig
from asynckv.links.address import parse_url
from harness.vllm_engines import Engine, free_url, started_pair, transfer


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


class Idle(Engine):
    """One without a process: keeps what it is told, and whether it runs."""

    def __init__(self, told: list[Idle], transfer: Any = None, **options: Any) -> None:
        self.transfer, self.options = transfer, options
        self.is_running, self.is_ready = True, False
        told.append(self)

    def wait_ready(self) -> Self:
        if self.options.get("never"):
            raise RuntimeError("the engine ended")
        self.is_ready = True
        return self

    def __exit__(self, *exc: object) -> None:
        self.is_running = False


def test_a_pair_knows_of_each_other_and_ends_when_it_is_left() -> None:
    engines: list[Idle] = []
    with started_pair(
        lambda config, **options: Idle(engines, config, **options),
        "recompute",
        produce={"layerwise": True},
        consume={"load_timeout_s": 1.0},
        options={"producer": {"block_size": 64}},
    ) as pair:
        producer, consumer = engines
        assert (pair.producer, pair.consumer) == (producer, consumer)
        assert all(engine.is_running and engine.is_ready for engine in engines)
    assert not any(engine.is_running for engine in engines)
    url = producer.transfer["kv_connector_extra_config"]["listen"]
    assert producer.transfer == transfer("kv_producer", listen=url, layerwise=True)
    extra = {"peers": [url], "load_timeout_s": 1.0}
    assert consumer.transfer == transfer("kv_consumer", "recompute", **extra)
    assert (producer.options, consumer.options) == ({"block_size": 64}, {})


def test_none_is_left_when_one_does_not_start() -> None:
    engines: list[Idle] = []
    never = {"consumer": {"never": True}}
    with pytest.raises(RuntimeError, match="ended"):
        with started_pair(
            lambda config, **options: Idle(engines, config, **options), options=never
        ):
            pytest.fail("one of the two is not ready")
    assert [engine.is_running for engine in engines] == [False, False]
