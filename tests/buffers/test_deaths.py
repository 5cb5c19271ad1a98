"""Processes that share memory and are killed, or stand still."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch

from asynckv import LookupBuffer, connect, serve
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.testing import until
from asynckv.testing.faults.processes import frozen_peer
from harness.children import ask, line_of, running, tell
from harness.forks import Fork, ForkServer
from harness.gpu_processes import BEGIN, GpuKind

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles"),
]

MIB = 2**20

CONSUMER = """
import asyncio, asynckv, sys
async def main():
    async with asynckv.connect(sys.argv[1]) as peer:
        print(peer.transport, flush=True)
        while True:
            try:
                async with peer.lookup.drop_select([1]) as entry:
                    print("has it", flush=True)
                    await asyncio.to_thread(sys.stdin.readline)
                    print(entry.key.min().item(), entry.key.max().item(), flush=True)
            except asynckv.LeaseLost:
                print("LeaseLost", flush=True)
            del entry
asyncio.run(main())
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
        asyncio.timeout(50),
    ):
        assert await line_of(process) == "map"
        assert await line_of(process) == "has it"
        yield process


async def test_a_consumer_keeps_its_bytes_past_its_lease_and_leaves_them_when_killed(
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
        assert await line_of(consumer) == "has it"
        await until(lambda: sum(buffer.statistics().mapped_by.values()) == 1)
        consumer.kill()
        await until(lambda: not buffer.statistics().mapped_by)
        await buffer.drop_select()
        await insert(buffer, 2.0, nbytes=3 * MIB)


async def test_a_producer_that_is_killed_takes_no_view_away(forks: ForkServer) -> None:
    async with forks.running(PRODUCER) as process, asyncio.timeout(30):
        async with connect(await line_of(process), reconnect_s=0) as peer:
            assert peer.transport == "map"
            with pytest.raises(Exception, match="lost|gone|given back"):
                async with peer.lookup.drop_select([1]) as entry:
                    process.kill()
                    await process.wait()
                    await until(lambda: not peer.is_connected)
                    view = entry.key_tensor
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

PUTTER = """
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
    forks: ForkServer, gpu_kind: GpuKind, how: str
) -> AsyncIterator[tuple[Fork, Fork]]:
    """Start both, and let one put an entry into the other's buffer."""
    async with (
        asyncio.timeout(50),
        forks.running(BEGIN + SERVER, gpu_kind, how) as server,
    ):
        url = await line_of(server)
        async with forks.running(BEGIN + PUTTER, gpu_kind, url) as producer:
            assert await line_of(producer) == "cuda_ipc True"
            yield server, producer


@pytest.mark.chaos
async def test_two_processes_put_within_one_gpu(
    forks: ForkServer, gpu_kind: GpuKind
) -> None:
    async with connected(forks, gpu_kind, "take") as (server, producer):
        assert await line_of(producer) == "put"
        assert await ask(server, "take") == "cuda:0 2.0"


@pytest.mark.trust
async def test_a_producer_that_is_killed_while_it_is_read_leaves_nothing(
    forks: ForkServer, gpu_kind: GpuKind
) -> None:
    async with connected(forks, gpu_kind, "hold") as (server, producer):
        assert await line_of(server) == "reads"
        producer.kill()
        await producer.wait()
        while await ask(server, "held") != "0 0 0":
            pass


@pytest.mark.trust
async def test_a_buffer_that_is_killed_while_it_reads_fails_the_put(
    forks: ForkServer, gpu_kind: GpuKind
) -> None:
    async with connected(forks, gpu_kind, "hold") as (server, producer):
        assert await line_of(server) == "reads"
        server.kill()
        assert await line_of(producer) == "PeerLost"


Consume = Callable[[str], contextlib.AbstractAsyncContextManager[Fork]]

GPU_CONSUMER = """
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

GPU_PRODUCER = """
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
async def producer(forks: ForkServer, gpu_kind: GpuKind) -> AsyncIterator[Fork]:
    async with (
        asyncio.timeout(50),
        forks.running(BEGIN + GPU_PRODUCER, gpu_kind) as process,
    ):
        yield process


@pytest.fixture
async def consume(forks: ForkServer, gpu_kind: GpuKind, producer: Fork) -> Consume:
    """Run a consumer that does one thing."""
    url = await line_of(producer)

    @contextlib.asynccontextmanager
    async def consume(how: str) -> AsyncIterator[Fork]:
        code = BEGIN + GPU_CONSUMER
        async with forks.running(code, gpu_kind, url, how) as consumer:
            assert await line_of(consumer) == "cuda_ipc"
            yield consumer

    return consume


async def kill(consumer: Fork, producer: Fork) -> None:
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
    consume: Consume, producer: Fork
) -> None:
    assert await ask(producer, "write") == "wrote"
    async with consume("stream") as consumer:
        assert await line_of(consumer) == "key 4.0"
        assert await ask(producer, "mapped") == "2"
        assert await ask(producer, "go on") == "wrote"
        assert await line_of(consumer) == "value 5.0"


@pytest.mark.trust
async def test_a_consumer_that_is_killed_in_mid_stream_leaves_the_layers(
    consume: Consume, producer: Fork
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
async def test_a_consumer_of_a_gpu_that_is_killed_with_its_views_leaves_them(
    consume: Consume, producer: Fork
) -> None:
    async with consume("view") as consumer:
        assert await line_of(consumer) == "has it 1.0"
        assert await ask(producer, "mapped") == "1"
        await kill(consumer, producer)
    async with consume("copy") as consumer:
        assert await line_of(consumer) == "1.0"  # it came back


@pytest.mark.trust
async def test_views_outlive_an_exporter_that_is_killed(
    consume: Consume, producer: Fork
) -> None:
    async with consume("view") as consumer:
        assert await line_of(consumer) == "has it 1.0"
        producer.kill()
        await producer.wait()
        assert await ask(consumer, "go on") == "1.0"
        assert await line_of(consumer) == "LeaseLost"
