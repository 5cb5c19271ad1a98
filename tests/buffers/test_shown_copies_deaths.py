"""Processes without a GPU that read what another one has on its own, and die."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

import pytest

from asynckv.links.fd_socket import has_fd_sockets
from asynckv.testing.gpu_processes import BEGIN, GPU_KINDS, GpuKind, why_not

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.skipif(not has_fd_sockets(), reason="nothing to map here"),
]

CONSUMER = """
async def main():
    async with asynckv.connect(sys.argv[2], max_bytes="64MiB", reconnect_s=0) as peer:
        print(peer.transport, flush=True)
        value = await peer.store.get("key")
        print(value.mean().item(), flush=True)
        async with peer.lookup.drop_select([1]) as entry:
            print(entry.key.mean().item(), flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            print(entry.key.mean().item(), flush=True)
try:
    asyncio.run(main())
except asynckv.LeaseLost:
    print("LeaseLost", flush=True)
"""
PRODUCER = """
async def main():
    device = open_device()
    async with (
        asynckv.LookupBuffer("64MiB", drain_s=0, device=device) as lookup,
        asynckv.StoreBuffer("64MiB", device=device) as store,
        asynckv.serve("tcp://127.0.0.1:0", lookup=lookup, store=store) as server,
    ):
        print(server.url, flush=True)
        await store.put("key", torch.full((2**20,), 3.0))
        await lookup.insert([1], None, torch.full((2**20,), 1.0), None, None)
        while True:
            order = (await asyncio.to_thread(sys.stdin.readline)).strip()
            if order == "staged":
                print(lookup.stage.used_bytes + store.stage.used_bytes, flush=True)
            else:
                return
asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def running(
    code: str, kind: str, *args: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", BEGIN + code, kind, *args), stdin=pipe, stdout=pipe
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def line_of(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


async def ask(process: asyncio.subprocess.Process, order: str) -> str:
    assert process.stdin is not None
    process.stdin.write(f"{order}\n".encode())
    await process.stdin.drain()
    return await line_of(process)


@pytest.fixture(params=GPU_KINDS)
def kind(request: pytest.FixtureRequest) -> GpuKind:
    found: GpuKind = request.param
    if reason := why_not(found):
        pytest.skip(reason)
    return found


@pytest.fixture
async def producer(kind: GpuKind) -> AsyncIterator[asyncio.subprocess.Process]:
    async with asyncio.timeout(50), running(PRODUCER, kind) as process:
        yield process


async def test_a_consumer_that_is_killed_with_its_views_leaves_them(
    kind: GpuKind, producer: asyncio.subprocess.Process
) -> None:
    url = await line_of(producer)
    for _ in range(2):  # what the first one had came back
        async with running(CONSUMER, kind, url) as consumer:
            assert await line_of(consumer) == "map"
            assert await line_of(consumer) == "3.0"
            assert await line_of(consumer) == "1.0"
            while await ask(producer, "staged") != str(4 * 2**20):
                pass  # the value's is let go soon
            consumer.kill()
            await consumer.wait()
            while await ask(producer, "staged") != "0":
                pass


@pytest.mark.trust
async def test_views_outlive_a_producer_that_is_killed(
    kind: GpuKind, producer: asyncio.subprocess.Process
) -> None:
    url = await line_of(producer)
    async with running(CONSUMER, kind, url) as consumer:
        assert [await line_of(consumer) for _ in range(3)] == ["map", "3.0", "1.0"]
        producer.kill()
        await producer.wait()
        assert await ask(consumer, "go on") == "1.0"
        assert await line_of(consumer) == "LeaseLost"
