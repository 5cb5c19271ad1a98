"""Processes that share memory and die, or stand still."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import connect
from asynckv.buffers.serve import serve
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.testing.blocked import until
from asynckv.testing.faults.processes import frozen_peer
from harness.children import line_of, running, tell

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.skipif(not has_fd_sockets(), reason="nothing to map here"),
]

MIB = 2**20
CONSUMER = """
import asyncio, asynckv, sys
async def main():
    async with asynckv.connect(sys.argv[1]) as peer:
        print(peer.transport, flush=True)
        async with peer.lookup.drop_select([1]) as entry:
            print("has it", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            print(entry.key.min().item(), entry.key.max().item(), flush=True)
try:
    asyncio.run(main())
except asynckv.LeaseLost:
    print("LeaseLost", flush=True)
"""
PRODUCER = """
import asyncio, asynckv, torch
async def main():
    async with (
        asynckv.LookupBuffer("8MiB", drain_s=0) as lookup,
        asynckv.serve("tcp://127.0.0.1:0", lookup=lookup) as server,
    ):
        for value in (1.0, 2.0):
            await lookup.insert([1], None, torch.full((2**18,), value), None, None)
        print(server.url, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


def socket_names() -> list[str]:
    """Our unix sockets with a name; those without a file begin with an at sign."""
    links = [_link(path) for path in Path("/proc/self/fd").iterdir()]
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    named = [line for line in lines[1:] if len(line) == 8]
    return [line[-1] for line in named if f"socket:[{line[6]}]" in links]


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except FileNotFoundError:  # the folder's own
        return ""


def is_reached(buffer: LookupBuffer) -> bool:
    """Does an application have the one entry, as far as the buffer knows?"""
    (entry,) = buffer.ledger.table.entries.values()
    return all(lease.reached for lease in entry.leases.values())


async def insert(buffer: LookupBuffer, value: float, nbytes: int = MIB) -> None:
    await buffer.insert([1], None, torch.full((nbytes // 4,), value), None, None)


@pytest.fixture
async def buffer() -> AsyncIterator[LookupBuffer]:
    async with LookupBuffer(4 * MIB, drain_s=0, max_hold_s=0.5) as buffer:
        yield buffer


@contextlib.asynccontextmanager
async def viewing(buffer: LookupBuffer) -> AsyncIterator[asyncio.subprocess.Process]:
    """Insert an entry, and run a process that has views of it."""
    await insert(buffer, 1.0)
    async with (
        serve("tcp://127.0.0.1:0", lookup=buffer) as server,
        running(CONSUMER, server.url) as process,
        asyncio.timeout(30),
    ):
        assert await line_of(process) == "map"
        assert await line_of(process) == "has it"
        yield process


async def test_a_consumer_that_is_killed_with_its_views_leaves_them(
    buffer: LookupBuffer,
) -> None:
    async with viewing(buffer) as consumer:
        assert sum(buffer.statistics().mapped_by.values()) == 1
        consumer.kill()
        await until(lambda: not buffer.statistics().mapped_by)
        await buffer.drop_select()
        await insert(buffer, 2.0, nbytes=3 * MIB)


async def test_a_consumer_that_stands_still_past_its_lease_keeps_its_bytes(
    buffer: LookupBuffer,
) -> None:
    async with viewing(buffer) as consumer:
        await until(lambda: is_reached(buffer))
        async with frozen_peer(consumer.pid):
            await until(lambda: buffer.statistics().lapsed == 1)
            assert (await buffer.drop_select([1])).attempt == 2
            for value in range(3, 30):  # many times over what is left
                await insert(buffer, float(value))
                await buffer.drop_select([1])
            await insert(buffer, 30.0, nbytes=3 * MIB - 4096)
        await tell(consumer, "go on")
        assert await line_of(consumer) == "1.0 1.0"
        assert await line_of(consumer) == "LeaseLost"


async def test_a_producer_that_is_killed_takes_no_view_away() -> None:
    async with running(PRODUCER) as process, asyncio.timeout(30):
        async with connect(await line_of(process), reconnect_s=0) as peer:
            assert peer.transport == "map"
            with pytest.raises(Exception, match="lost|gone|given back"):
                async with peer.lookup.drop_select([1]) as entry:
                    process.kill()
                    await process.wait()
                    await until(lambda: not peer.is_connected)
                    assert isinstance(entry.key, torch.Tensor)
                    view = entry.key
                    assert view.eq(1.0).all()
        assert view.eq(1.0).all()


async def test_no_socket_has_a_file_that_could_be_left_behind(
    buffer: LookupBuffer,
) -> None:
    await insert(buffer, 1.0)
    async with (
        serve("tcp://127.0.0.1:0", lookup=buffer) as server,
        connect(server.url) as peer,
    ):
        assert peer.transport == "map"
        ours = socket_names()
        assert ours and all(name.startswith("@asynckv-") for name in ours)
