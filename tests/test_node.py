from __future__ import annotations

import asyncio
import logging
import math
import socket
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

import asynckv
from asynckv.config import KVTransferConfig
from asynckv.errors import BufferClosed, ConfigError, Overloaded, PeerLost, WrongRole
from asynckv.node import Node, open as open_node
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation

TOKENS = [1, 2, 3]
KEY = torch.arange(100_000, dtype=torch.float32)


def config_of(role: str, port: int = 0, **extra: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_role=role,  # type: ignore[arg-type]
        kv_port=port,
        kv_buffer_size="64MiB",
        kv_connector_extra_config=extra,
    )


def port_of(node: Node) -> int:
    port = urlsplit(node.url).port
    assert port is not None
    return port


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


async def test_a_producers_entry_reaches_its_consumer() -> None:
    async with open_node(config_of("kv_producer")) as producer:
        entry_id = await producer.lookup.insert(TOKENS, None, KEY, None, None)
        async with open_node(config_of("kv_consumer", port_of(producer))) as consumer:
            entry = await consumer.lookup.drop_select(TOKENS)
            assert isinstance(entry.key, torch.Tensor)
            assert torch.equal(entry.key, KEY)
            await producer.lookup.taken(entry_id)


async def test_a_node_keeps_no_more_of_waiting_requests_than_it_was_told() -> None:
    few = config_of("kv_producer", max_waiting_bytes="4KiB")
    async with open_node(few) as producer:
        async with open_node(config_of("kv_consumer", port_of(producer))) as consumer:
            with pytest.raises(Overloaded):
                await consumer.lookup.drop_select(list(range(1000)))
            await producer.lookup.insert(TOKENS, None, KEY, None, None)
            await consumer.lookup.drop_select()
        assert producer.server is not None
        assert producer.server.refused_requests == 1


async def test_each_role_has_its_own_verbs_only() -> None:
    async with open_node(config_of("kv_producer")) as producer:
        with pytest.raises(WrongRole):
            await producer.lookup.drop_select(TOKENS)
        async with open_node(config_of("kv_consumer", port_of(producer))) as consumer:
            with pytest.raises(WrongRole):
                await consumer.lookup.insert(TOKENS, None, KEY, None, None)
            assert (producer.peer, consumer.server) == (None, None)
            assert consumer.url == producer.url


async def test_two_that_are_both_insert_here_and_select_there() -> None:
    ports = free_port(), free_port()
    configs = [
        config_of("kv_both", mine, peer_url=f"tcp://127.0.0.1:{other}")
        for mine, other in (ports, ports[::-1])
    ]
    async with AsyncExitStack() as stack:
        one, two = await asyncio.gather(
            *(stack.enter_async_context(open_node(config)) for config in configs)
        )
        await one.lookup.insert(TOKENS, None, KEY, None, None)
        assert (await one.lookup.peek(TOKENS), await two.lookup.peek(TOKENS)) == (0, 3)
        assert (await two.lookup.drop_select(TOKENS)).matched_tokens == 3


async def test_a_consumer_that_comes_first_waits_for_its_producer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "asynckv")
    port, waiting = free_port(), asyncio.Event()

    async def consume() -> int:
        waiting.set()
        async with open_node(config_of("kv_consumer", port)) as consumer:
            return (await consumer.lookup.drop_select(TOKENS)).matched_tokens

    task = asyncio.create_task(consume())
    await waiting.wait()
    async with open_node(config_of("kv_producer", port)) as producer:
        await producer.lookup.insert(TOKENS, None, KEY, None, None)
        assert await task == 3
    assert f"a node waits for its peer at tcp://127.0.0.1:{port}" in caplog.text


async def test_a_peer_that_never_comes_is_named() -> None:
    config = config_of("kv_consumer", free_port(), store_timeout=0.2)
    with pytest.raises(PeerLost, match="nobody served at tcp:.*store_timeout"):
        async with open_node(config):
            pass


async def test_what_is_left_is_served_while_the_producer_leaves() -> None:
    async with open_node(config_of("kv_producer")) as producer:
        await producer.lookup.insert(TOKENS, None, KEY, None, None)
        config = config_of("kv_consumer", port_of(producer))
        taken = asyncio.create_task(take_late(config))
    assert await taken == 3


async def take_late(config: KVTransferConfig) -> int:
    async with open_node(config) as consumer:
        return (await consumer.lookup.drop_select(TOKENS)).matched_tokens


async def test_leaving_closes_the_nodes_buffer() -> None:
    async with open_node(config_of("kv_producer"), drain_s=0) as producer:
        await producer.lookup.insert(TOKENS, None, KEY, None, None)
    with pytest.raises(BufferClosed):
        await producer.lookup.insert(TOKENS, None, KEY, None, None)


async def test_an_opening_that_is_cancelled_leaves_nothing_behind() -> None:
    async def visit() -> int:
        async with open_node(config) as node:
            return await node.lookup.peek(TOKENS)

    async def check(k: int, mode: CancelMode, outcome: Outcome[int]) -> None:
        assert outcome.cancelled or outcome.value == 3
        assert await producer.lookup.peek(TOKENS) == 3

    async with open_node(config_of("kv_producer"), drain_s=0) as producer:
        await producer.lookup.insert(TOKENS, None, KEY, None, None)
        config = config_of("kv_consumer", port_of(producer))
        await sweep_cancellation(visit, check)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (KVTransferConfig(), "kv_role is not set"),
        (config_of("kv_both"), "nobody to ask.*peer_url"),
        (
            KVTransferConfig(kv_role="kv_producer", kv_buffer_device="tpu"),
            "device 'tpu'",
        ),
        (config_of("kv_producer", port_offset="x"), "port_offset"),
        (config_of("kv_producer", local_rank="x"), "local_rank"),
    ],
)
async def test_what_cannot_be_opened_is_named(
    config: KVTransferConfig, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        async with open_node(config):
            pass


def test_a_drain_that_is_no_time_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="drain_s is a number of seconds"):
        open_node(config_of("kv_consumer"), drain_s=math.nan)


def test_a_device_that_there_is_not_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="device"):
        open_node(config_of("kv_consumer"), device="tpu")


@pytest.mark.parametrize("config", ["tcp://127.0.0.1:1", {"kv_role": "kv_both"}])
def test_what_is_no_configuration_is_refused_at_once(config: KVTransferConfig) -> None:
    with pytest.raises(
        TypeError, match=r"config is a KVTransferConfig, not a (str|dict)"
    ):
        open_node(config)


async def test_a_node_may_be_left_in_another_task() -> None:
    context = asynckv.open(config_of("kv_producer"))
    node = await asyncio.create_task(context.__aenter__())
    assert node.server is not None
    await asyncio.create_task(context.__aexit__(None, None, None))
