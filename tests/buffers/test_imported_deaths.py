"""Processes that share memory of one GPU and die."""

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
    pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles"),
]

CONSUMER = """
async def main():
    device = open_device()
    async with asynckv.connect(
        sys.argv[2], device=device, max_bytes="64MiB", reconnect_s=0
    ) as peer:
        print(peer.transport, flush=True)
        if sys.argv[3] == "get":
            value = await peer.store.get("key")
            print(value.cpu().float().mean().item(), flush=True)
            return
        if sys.argv[3] == "copy":
            entry = await peer.lookup.drop_select([1])
            print(entry.key.cpu().float().mean().item(), flush=True)
            return
        async with peer.lookup.drop_select([1]) as entry:
            print("has it", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            print(entry.key.cpu().float().mean().item(), flush=True)
try:
    asyncio.run(main())
except asynckv.LeaseLost:
    print("LeaseLost", flush=True)
except asynckv.PeerLost:
    print("PeerLost", flush=True)
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
        for value in (1.0, 2.0):
            await lookup.insert([1], None, torch.full((2**20,), value), None, None)
        while True:
            order = (await asyncio.to_thread(sys.stdin.readline)).strip()
            if order == "mapped":
                print(sum(lookup.statistics().mapped_by.values()), flush=True)
            elif order == "pinned":
                print(lookup.statistics().pinned_bytes, flush=True)
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


async def test_two_processes_hand_an_entry_over_on_one_gpu(
    kind: GpuKind, producer: asyncio.subprocess.Process
) -> None:
    url = await line_of(producer)
    async with running(CONSUMER, kind, url, "copy") as consumer:
        assert await line_of(consumer) == "cuda_ipc"
        assert await line_of(consumer) == "1.0"


async def test_two_processes_share_a_stored_value_on_one_gpu(
    kind: GpuKind, producer: asyncio.subprocess.Process
) -> None:
    url = await line_of(producer)
    async with running(CONSUMER, kind, url, "get") as consumer:
        assert await line_of(consumer) == "cuda_ipc"
        assert await line_of(consumer) == "3.0"


@pytest.mark.trust
async def test_a_consumer_that_is_killed_with_its_views_leaves_them(
    kind: GpuKind, producer: asyncio.subprocess.Process
) -> None:
    url = await line_of(producer)
    async with running(CONSUMER, kind, url, "view") as consumer:
        assert await line_of(consumer) == "cuda_ipc"
        assert await line_of(consumer) == "has it"
        assert await ask(producer, "mapped") == "1"
        consumer.kill()
        await consumer.wait()
        while await ask(producer, "mapped") != "0":
            pass
    async with running(CONSUMER, kind, url, "copy") as consumer:
        assert await line_of(consumer) == "cuda_ipc"
        assert await line_of(consumer) == "1.0"  # it came back


@pytest.mark.trust
async def test_views_outlive_an_exporter_that_is_killed(
    kind: GpuKind, producer: asyncio.subprocess.Process
) -> None:
    url = await line_of(producer)
    async with running(CONSUMER, kind, url, "view") as consumer:
        assert await line_of(consumer) == "cuda_ipc"
        assert await line_of(consumer) == "has it"
        producer.kill()
        await producer.wait()
        assert await ask(consumer, "go on") == "1.0"
        assert await line_of(consumer) == "LeaseLost"
