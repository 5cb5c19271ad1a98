"""Nodes: opened from a configuration, used by their roles, closed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final

from asynckv.abc import KVLookupBuffer
from asynckv.config import KVRole, KVTransferConfig
from asynckv.errors import EntryAborted
from asynckv.node import Node, open as open_node
from asynckv.testing.blocked import until
from asynckv.testing.cancellation import Outcome
from asynckv.testing.expectations import expect, noise
from asynckv.types import TensorSpec
from harness.cancellations.entries import LARGE
from harness.cancellations.grounds import Ground, Kind
from harness.cancellations.scenario import Scenario
from harness.cancellations.sweeper import Sweeper

__all__ = ("NODES", "a_consumers_node", "a_producers_node", "the_verbs_of_nodes")


def _config(ground: Ground, role: KVRole, port: int = 0) -> KVTransferConfig:
    extra: dict[str, Any] = {}
    if (tls := ground.options.get("tls")) is not None:
        names = ("certificate", "key", "ca")
        extra["tls"] = dict(zip(names, tls.paths, strict=True))
    return KVTransferConfig(
        kv_role=role,
        kv_port=port,
        kv_buffer_size=1e6,
        kv_connector_extra_config=extra,
    )


async def a_producers_node(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Entered, used and left."""

    async def visit() -> None:
        async with open_node(_config(ground, "kv_producer"), drain_s=0) as node:
            await node.lookup.insert([1], None, None, None, None)
            await asyncio.sleep(0)

    async def check(outcome: Outcome[None]) -> None:
        await ground.check_quiet()

    await sweeper.sweep("a producer's node", visit, check)


async def a_consumers_node(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Entered, used and left; its producer is none the wiser."""
    async with open_node(_config(ground, "kv_producer"), drain_s=0) as producer:
        port = int(producer.url.rpartition(":")[2])

        async def visit() -> None:
            async with open_node(_config(ground, "kv_consumer", port)) as node:
                async with node.lookup.drop_select([1]):
                    pass

        async def before() -> None:
            if not await producer.lookup.peek([1]):
                await producer.lookup.insert([1], None, None, None, None)

        async def check(outcome: Outcome[None]) -> None:
            server = producer.server
            await until(lambda: server is not None and not server.peers)
            found = await producer.lookup.peek([1])
            expect(outcome.cancelled or not found, "it was taken")

        await sweeper.sweep("a consumer's node", visit, check, before)
    await ground.check_quiet()


@contextlib.asynccontextmanager
async def _two_nodes(ground: Ground) -> AsyncIterator[tuple[Node, Node]]:
    async with open_node(_config(ground, "kv_producer"), drain_s=0) as producer:
        port = int(producer.url.rpartition(":")[2])
        async with open_node(_config(ground, "kv_consumer", port)) as consumer:
            yield producer, consumer


async def the_verbs_of_nodes(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Each goes where its role sends it; what is inserted can be selected."""
    async with _two_nodes(ground) as (producer, consumer):
        producing, consuming = producer.lookup, consumer.lookup

        async def before() -> None:
            await producing.insert([1], None, noise(nbytes, 1), None, None)

        async def check(outcome: Outcome[Any]) -> None:
            await consuming.peek([1])
            statistics: Any = producing.statistics
            await until(lambda: not statistics().leased)
            for _ in range(statistics().entries):
                await consuming.drop_select()
            await until(lambda: not statistics().used_bytes)

        for name, call in _verbs(producing, consuming, nbytes):
            await sweeper.sweep(f"{name} of a node", call, check, before)
    await _cancel_the_end(ground, sweeper)
    await ground.check_quiet()


def _verbs(
    producing: KVLookupBuffer, consuming: KVLookupBuffer, nbytes: int
) -> list[tuple[str, Callable[[], Coroutine[Any, Any, Any]]]]:
    key = noise(nbytes, 2)

    async def write() -> None:
        specs = {"key": TensorSpec((nbytes,), "uint8")}
        async with producing.open_insert([2], None, specs) as writer:
            await writer.put("key", key)

    async def read() -> None:
        async with consuming.open_drop_select([1]) as stream:
            await stream.wait_for("key")

    async def wait_for_the_end() -> None:
        name = await producing.insert([3], None, None, None, None, ttl_s=0)
        with contextlib.suppress(EntryAborted):
            await producing.taken(name)

    return [
        ("insert", lambda: producing.insert([2], None, key, None, None)),
        ("peek", lambda: consuming.peek([1])),
        ("drop_select", lambda: consuming.drop_select([1])),
        ("open_insert", write),
        ("open_drop_select", read),
        ("taken", wait_for_the_end),
        ("withdraw", lambda: producing.withdraw("no such entry")),
    ]


async def _cancel_the_end(ground: Ground, sweeper: Sweeper) -> None:
    """A consumer's node closes its peer, and its producer forgets it."""
    stack = contextlib.AsyncExitStack()
    nodes: tuple[Node, Node]

    async def before() -> None:
        nonlocal nodes
        nodes = await stack.enter_async_context(_two_nodes(ground))

    async def check(outcome: Outcome[None]) -> None:
        await nodes[1].lookup.aclose()
        server = nodes[0].server
        await until(lambda: server is not None and not server.peers)
        await stack.aclose()

    async with stack:
        await sweeper.sweep(
            "aclose of a node's lookup", lambda: nodes[1].lookup.aclose(), check, before
        )


_BY_TCP: Final[tuple[Kind, ...]] = ("tcp", "tls")

NODES: Final = tuple(
    Scenario(run, covers, _BY_TCP, sizes, is_costly=True)
    for run, covers, sizes in (
        (a_producers_node, ("open",), (0,)),
        (a_consumers_node, ("open",), (0,)),
        (the_verbs_of_nodes, ("LookupByRole.aclose",), (LARGE,)),
    )
)
