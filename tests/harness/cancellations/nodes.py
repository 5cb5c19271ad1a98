"""Nodes and groups: opened, used by their roles and closed, and the others are told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

from asynckv.abc import KVLookupBuffer
from asynckv.config import KVRole, KVTransferConfig
from asynckv.errors import EndOfStream, EntryAborted, PeerLost
from asynckv.node import Node, open as open_node
from asynckv.pipes.group import Group, join_group
from asynckv.testing.blocked import until
from asynckv.testing.expectations import expect, noise
from asynckv.testing.pairs import free_port, open_group
from asynckv.types import TensorSpec
from harness.cancellations.grounds import Ground
from harness.cancellations.sweeper import LARGE, Sweeper, scenario, ticks

__all__: tuple[str, ...] = ()

_BY_TCP: Final[dict[str, Any]] = {
    "kinds": ("tcp", "tls"),
    "sizes": (0,),
    "is_costly": True,
}


def _open(ground: Ground, role: KVRole, producer: Node | None = None) -> Any:
    """Return a node to be entered; a consumer's is one of ``producer``."""
    extra: dict[str, Any] = {}
    if (tls := ground.options.get("tls")) is not None:
        names = ("certificate", "key", "ca")
        extra["tls"] = dict(zip(names, tls.paths, strict=True))
    port = int(producer.url.rpartition(":")[2]) if producer else 0
    return open_node(
        KVTransferConfig(
            kv_role=role,
            kv_port=port,
            kv_buffer_size=1e6,
            kv_connector_extra_config=extra,
        ),
        drain_s=0,
    )


async def _until_left(producer: Node) -> None:
    server = producer.server
    await until(lambda: server is not None and not server.peers)


@scenario("open", **_BY_TCP)
async def a_producers_node(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Entered, used and left."""

    async def visit() -> None:
        async with _open(ground, "kv_producer") as node:
            await node.lookup.insert([1], None, None, None, None)
            await asyncio.sleep(0)

    async for cancel in sweeper.sweep():
        await cancel(visit)


@scenario("open", **_BY_TCP)
async def a_consumers_node(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Entered, used and left; its producer is none the wiser."""
    async with _open(ground, "kv_producer") as producer:

        async def visit() -> None:
            async with _open(ground, "kv_consumer", producer) as node:
                async with node.lookup.drop_select([1]):
                    pass

        async for cancel in sweeper.sweep(is_open=True):
            if not await producer.lookup.peek([1]):
                await producer.lookup.insert([1], None, None, None, None)
            outcome = await cancel(visit)
            await _until_left(producer)
            found = await producer.lookup.peek([1])
            expect(outcome.cancelled or not found, "it was taken")


@contextlib.asynccontextmanager
async def _two_nodes(ground: Ground) -> AsyncIterator[tuple[Node, Node]]:
    async with _open(ground, "kv_producer") as producer:
        async with _open(ground, "kv_consumer", producer) as consumer:
            yield producer, consumer


@scenario("LookupByRole.aclose", **_BY_TCP | {"sizes": (LARGE,)})
async def the_verbs_of_nodes(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Each goes where its role sends it; what is inserted can be selected."""
    async with _two_nodes(ground) as (producer, consumer):
        producing, consuming = producer.lookup, consumer.lookup
        statistics: Any = producing.statistics
        for name, (call, *args) in _verbs(producing, consuming, nbytes).items():
            async for cancel in sweeper.sweep(name, is_open=True):
                await producing.insert([1], None, noise(nbytes, 1), None, None)
                await cancel(call, *args)
                await consuming.peek([1])
                await until(lambda: not statistics().leased)
                for _ in range(statistics().entries):
                    await consuming.drop_select()
                await until(lambda: not statistics().used_bytes)
    async for cancel in sweeper.sweep("its end", is_open=True):
        async with _two_nodes(ground) as (producer, consumer):
            await cancel(consumer.lookup.aclose)
            await consumer.lookup.aclose()
            await _until_left(producer)  # it forgets the peer that was closed


def _verbs(
    producing: KVLookupBuffer, consuming: KVLookupBuffer, nbytes: int
) -> dict[str, tuple[Any, ...]]:
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

    return {
        "insert": (producing.insert, [2], None, key, None, None),
        "peek": (consuming.peek, [1]),
        "drop_select": (consuming.drop_select, [1]),
        "open_insert": (write,),
        "open_drop_select": (read,),
        "taken": (wait_for_the_end,),
        "withdraw": (producing.withdraw, "no such entry"),
    }


@scenario("Group.barrier", **_BY_TCP)
async def a_barrier(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """It is waited at again, by either rank."""

    async def pass_by(group: Group) -> None:
        await sweeper.pause()
        await group.barrier()

    async with open_group(2, **ground.options) as groups:
        for rank in range(2):
            async for cancel in sweeper.sweep(f"of rank {rank}", is_open=True):
                other = asyncio.create_task(pass_by(groups[1 - rank]))
                outcome = await cancel(groups[rank].barrier)
                if outcome.cancelled:
                    await groups[rank].barrier()
                await other


@scenario("join_group", "Group.__aenter__", "Group.__aexit__", **_BY_TCP)
async def a_joining(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Joined, used and left, by either rank."""
    port = free_port()

    async def join(rank: int) -> None:
        where: dict[str, Any] = {"size": 2, "host": "127.0.0.1", "port": port}
        async with join_group(
            rank=rank, timeout_s=10, max_bytes=2**20, **where, **ground.options
        ) as group:
            await group.barrier()

    for rank in range(2):
        async for cancel in sweeper.sweep(f"of rank {rank}"):
            other = asyncio.create_task(join(1 - rank))
            outcome = await cancel(join, rank)
            if outcome.cancelled:
                # Lost in the middle, or waiting for somebody to come (again).
                await ticks(20)
                other.cancel()
            (error,) = await asyncio.gather(other, return_exceptions=True)
            is_told = isinstance(error, PeerLost | asyncio.CancelledError)
            expect(error is None or (outcome.cancelled and is_told), repr(error))


@scenario("Group.aclose", **_BY_TCP)
async def a_groups_end(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """The other rank hears of it."""
    async for cancel in sweeper.sweep():
        async with open_group(2, **ground.options) as groups:
            await cancel(groups[0].aclose)
            if not cancel.has_begun:
                groups[0].abort()
            (told,) = await asyncio.gather(
                groups[1].prev_pipe.recv_tensor(), return_exceptions=True
            )
            expect(isinstance(told, PeerLost | EndOfStream), f"it received {told!r}")
            groups[1].abort()
            for group in reversed(groups):
                await group.aclose()
