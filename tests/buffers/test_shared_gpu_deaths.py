"""Processes that share memory of one GPU, and die."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from asynckv.links.fd_socket import has_fd_sockets
from harness.children import ask, line_of
from harness.gpu_processes import GpuKind, running

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles"),
]

Consume = Callable[
    [str], contextlib.AbstractAsyncContextManager[asyncio.subprocess.Process]
]

CONSUMER = """
async def main():
    how, device = sys.argv[3], open_device()
    async with asynckv.connect(
        sys.argv[2], device=device, max_bytes="64MiB", reconnect_s=0
    ) as peer:
        tell(peer.transport)
        await globals()[how](peer)
def mean(tensor):
    return tensor.cpu().float().mean().item()
async def stream(peer):
    async with peer.lookup.open_drop_select([2]) as stream:
        async for name, layer in stream:
            tell(name, mean(layer))
async def copy(peer):
    tell(mean((await peer.lookup.drop_select([1])).key))
async def view(peer):
    async with peer.lookup.drop_select([1]) as entry:
        tell("has it", mean(entry.key))
        await order()
        tell(mean(entry.key))
try:
    asyncio.run(main())
except asynckv.LeaseLost:
    tell("LeaseLost")
except asynckv.PeerLost:
    tell("PeerLost")
"""
PRODUCER = """
import contextlib
async def main():
    device = open_device()
    async with (
        asynckv.LookupBuffer("64MiB", drain_s=0, device=device) as lookup,
        asynckv.serve("tcp://127.0.0.1:0", lookup=lookup) as server,
    ):
        tell(server.url)
        for value in (1.0, 2.0):
            await lookup.insert([1], None, torch.full((2**20,), value), None, None)
        writing = contextlib.AsyncExitStack()
        while True:
            word = await order()
            if word == "write":
                spec = asynckv.TensorSpec((2**20,), "float32")
                specs = dict.fromkeys(("key", "value"), spec)
                opened = lookup.open_insert([2], None, specs)
                writer = await writing.enter_async_context(opened)
                await writer.put("key", torch.full((2**20,), 4.0))
                tell("wrote")
            elif word == "go on":
                await writer.put("value", torch.full((2**20,), 5.0))
                await writing.aclose()
                tell("wrote")
            elif word == "mapped":
                tell(sum(lookup.statistics().mapped_by.values()))
            else:
                return
asyncio.run(main())
"""


@pytest.fixture
async def producer(gpu_kind: GpuKind) -> AsyncIterator[asyncio.subprocess.Process]:
    async with asyncio.timeout(50), running(PRODUCER, gpu_kind) as process:
        yield process


@pytest.fixture
async def consume(gpu_kind: GpuKind, producer: asyncio.subprocess.Process) -> Consume:
    """Run a consumer that does one thing."""
    url = await line_of(producer)

    @contextlib.asynccontextmanager
    async def consume(how: str) -> AsyncIterator[asyncio.subprocess.Process]:
        async with running(CONSUMER, gpu_kind, url, how) as consumer:
            assert await line_of(consumer) == "cuda_ipc"
            yield consumer

    return consume


async def kill(
    consumer: asyncio.subprocess.Process, producer: asyncio.subprocess.Process
) -> None:
    """Kill it, and wait until the producer says that nothing is left to it."""
    consumer.kill()
    await consumer.wait()
    while await ask(producer, "mapped") != "0":
        pass


async def test_two_processes_hand_an_entry_over_on_one_gpu(consume: Consume) -> None:
    async with consume("copy") as consumer:
        assert await line_of(consumer) == "1.0"


@pytest.mark.chaos
async def test_layers_are_streamed_between_two_processes_on_one_gpu(
    consume: Consume, producer: asyncio.subprocess.Process
) -> None:
    assert await ask(producer, "write") == "wrote"
    async with consume("stream") as consumer:
        assert await line_of(consumer) == "key 4.0"
        assert await ask(producer, "mapped") == "2"
        assert await ask(producer, "go on") == "wrote"
        assert await line_of(consumer) == "value 5.0"


@pytest.mark.trust
async def test_a_consumer_that_is_killed_in_mid_stream_leaves_the_layers(
    consume: Consume, producer: asyncio.subprocess.Process
) -> None:
    assert await ask(producer, "write") == "wrote"
    async with consume("stream") as consumer:
        assert await line_of(consumer) == "key 4.0"
        await kill(consumer, producer)
    assert await ask(producer, "go on") == "wrote"
    async with consume("stream") as consumer:
        layers = {await line_of(consumer) for _ in range(2)}
        assert layers == {"key 4.0", "value 5.0"}


@pytest.mark.trust
async def test_a_consumer_that_is_killed_with_its_views_leaves_them(
    consume: Consume, producer: asyncio.subprocess.Process
) -> None:
    async with consume("view") as consumer:
        assert await line_of(consumer) == "has it 1.0"
        assert await ask(producer, "mapped") == "1"
        await kill(consumer, producer)
    async with consume("copy") as consumer:
        assert await line_of(consumer) == "1.0"  # it came back


@pytest.mark.trust
async def test_views_outlive_an_exporter_that_is_killed(
    consume: Consume, producer: asyncio.subprocess.Process
) -> None:
    async with consume("view") as consumer:
        assert await line_of(consumer) == "has it 1.0"
        producer.kill()
        await producer.wait()
        assert await ask(consumer, "go on") == "1.0"
        assert await line_of(consumer) == "LeaseLost"
