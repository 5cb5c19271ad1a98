"""Two processes with a pipe through memory of one host, of which one is killed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from asynckv.links.fd_socket import has_fd_sockets
from harness.children import ask, line_of, running

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.skipif(not has_fd_sockets(), reason="nothing to map here"),
]

COMMON = """
import asyncio, sys, torch, asynckv

def tell(*words):
    print(*words, flush=True)

async def order():
    loop = asyncio.get_running_loop()
    return (await loop.run_in_executor(None, sys.stdin.readline)).strip()

def hold_reads(pipe):
    async def hold(place, digest, target):
        tell("reads")
        await asyncio.Event().wait()
    pipe._receives._mapping.read = hold

async def settle(pipe):
    while pipe.transport != "map":
        await asyncio.sleep(0.01)
"""
RECEIVER = (
    COMMON
    + """
async def main():
    async with asynckv.listen_pipe("tcp://127.0.0.1:0", max_bytes="16MiB") as listener:
        tell(listener.url)
        async with await listener.accept() as pipe:
            await settle(pipe)
            if sys.argv[1] == "hold":
                hold_reads(pipe)
            tell(pipe.transport)
            async for tensor in pipe:
                tell(tensor.mean().item())
        tell("end")
try:
    asyncio.run(main())
except asynckv.PeerLost:
    tell("PeerLost")
"""
)
SENDER = (
    COMMON
    + """
async def main():
    async with asynckv.open_pipe(sys.argv[1], max_bytes="16MiB") as pipe:
        await settle(pipe)
        tell(pipe.transport)
        await order()
        importer = pipe._sends._mapping._importer
        for value in (1.0, 2.0):
            await pipe.send_tensor(torch.full((2**20,), value))
        tell("sent")
        while (word := await order()) != "go":
            tell(len(importer._pins), importer._connection is not None)
    tell("end")
try:
    asyncio.run(main())
except asynckv.PipeBroken:
    tell("PipeBroken")
"""
)


@contextlib.asynccontextmanager
async def connected(
    how: str,
) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.subprocess.Process]]:
    """Start both, and wait until the sender has sent."""
    async with asyncio.timeout(50), running(RECEIVER, how) as receiver:
        url = await line_of(receiver)
        async with running(SENDER, url) as sender:
            assert await line_of(sender) == await line_of(receiver) == "map"
            assert await ask(sender, "send") == "sent"
            yield sender, receiver


async def test_two_processes_send_through_memory() -> None:
    async with connected("take") as (sender, receiver):
        assert await line_of(receiver) == "1.0"
        assert await line_of(receiver) == "2.0"
        assert await ask(sender, "go") == "end"
        assert await line_of(receiver) == "end"


async def test_a_sender_that_is_killed_while_it_is_read() -> None:
    async with connected("hold") as (sender, receiver):
        assert await line_of(receiver) == "reads"
        sender.kill()
        while (said := await line_of(receiver)) == "reads":
            pass
        assert said == "PeerLost"


async def test_a_receiver_that_is_killed_while_it_reads() -> None:
    async with connected("hold") as (sender, receiver):
        assert await line_of(receiver) == "reads"
        assert await ask(sender, "held") == "2 True"
        receiver.kill()
        while await ask(sender, "held") != "0 False":
            pass
        assert await ask(sender, "go") == "PipeBroken"
