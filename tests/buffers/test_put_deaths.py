"""Processes that put into a buffer on one GPU, of which one is killed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from asynckv.links.fd_socket import has_fd_sockets
from harness.children import ask, line_of
from harness.gpu_processes import GpuKind, running

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles"),
]

SERVER = """
from asynckv.transfers.read_route import IpcRoute

def hold_reads():
    copy = IpcRoute._copy
    async def hold(arrivals, *places):
        IpcRoute._copy = copy
        tell("reads")
        await asyncio.Event().wait()
    IpcRoute._copy = hold

async def main():
    device = open_device()
    if sys.argv[2] == "hold":
        hold_reads()
    async with (
        asynckv.LookupBuffer("64MiB", drain_s=0, device=device) as lookup,
        asynckv.serve("tcp://127.0.0.1:0", lookup=lookup) as server,
    ):
        tell(server.url)
        while (word := await order()) != "go":
            if word == "take":
                entry = await lookup.drop_select([1])
                tell(entry.key.device, entry.key.cpu().float().mean().item())
                del entry
            else:
                stats = lookup.statistics()
                tell(stats.entries, stats.used_bytes, len(server.peers))
asyncio.run(main())
"""
PRODUCER = """
async def main():
    device = open_device()
    async with asynckv.connect(
        sys.argv[2], device=device, max_bytes="64MiB", reconnect_s=0
    ) as peer:
        tell(peer.transport, peer._imports.importer(peer._linked()) is not None)
        await peer.lookup.insert([1], None, torch.full((2**20,), 2.0), None, None)
        tell("put")
try:
    asyncio.run(main())
except asynckv.PeerLost:
    tell("PeerLost")
"""


@contextlib.asynccontextmanager
async def connected(
    gpu_kind: GpuKind, how: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.subprocess.Process]]:
    """Start both, and let one put an entry into the other's buffer."""
    async with asyncio.timeout(50), running(SERVER, gpu_kind, how) as server:
        url = await line_of(server)
        async with running(PRODUCER, gpu_kind, url) as producer:
            assert await line_of(producer) == "cuda_ipc True"
            yield server, producer


@pytest.mark.chaos
async def test_two_processes_put_within_one_gpu(gpu_kind: GpuKind) -> None:
    async with connected(gpu_kind, "take") as (server, producer):
        assert await line_of(producer) == "put"
        assert await ask(server, "take") == "cuda:0 2.0"


@pytest.mark.trust
async def test_a_producer_that_is_killed_while_it_is_read_leaves_nothing(
    gpu_kind: GpuKind,
) -> None:
    async with connected(gpu_kind, "hold") as (server, producer):
        assert await line_of(server) == "reads"
        producer.kill()
        await producer.wait()
        while await ask(server, "held") != "0 0 0":
            pass


@pytest.mark.trust
async def test_a_buffer_that_is_killed_while_it_reads_fails_the_put(
    gpu_kind: GpuKind,
) -> None:
    async with connected(gpu_kind, "hold") as (server, producer):
        assert await line_of(server) == "reads"
        server.kill()
        assert await line_of(producer) == "PeerLost"
