"""Two processes with a pipe through memory that they share, of which one is killed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import cast

import pytest

from asynckv.links.fd_socket import has_fd_sockets
from harness.children import ask, line_of
from harness.forks import Fork, ForkServer
from harness.gpu_processes import BEGIN, GpuKind, usable

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles"),
]

REAL = pytest.param("real", marks=pytest.mark.gpu)
WAYS = pytest.mark.parametrize("way", ["map", "fake", REAL])
"""Through memory of the host, or within a GPU of that kind."""

TRUST = pytest.mark.trust
DEATHS = pytest.mark.parametrize(
    "way",
    [
        "map",
        pytest.param("fake", marks=TRUST),
        pytest.param("real", marks=[TRUST, pytest.mark.gpu]),
    ],
)

COMMON = """
is_map = sys.argv[1] == "map"
options = {"max_bytes": "16MiB"} if is_map else {
    "max_bytes": "16MiB", "device": open_device()
}

async def hold(*_):
    tell("reads")
    await asyncio.Event().wait()

def hold_reads(pipe):
    if is_map:
        pipe._receives._mapping.read = hold
    else:
        from asynckv.transfers.read_route import IpcRoute
        IpcRoute._copy = hold

async def settle(pipe):
    while pipe.transport != ("map" if is_map else "cuda_ipc"):
        await asyncio.sleep(0.01)
"""

RECEIVER = (
    COMMON
    + """
async def main():
    async with asynckv.listen_pipe("tcp://127.0.0.1:0", **options) as listener:
        tell(listener.url)
        async with await listener.accept() as pipe:
            await settle(pipe)
            if sys.argv[2] == "hold":
                hold_reads(pipe)
            tell(pipe.transport)
            async for tensor in pipe:
                tell(tensor.device.type, tensor.cpu().float().mean().item())
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
    async with asynckv.open_pipe(sys.argv[2], **options) as pipe:
        await settle(pipe)
        tell(pipe.transport)
        await order()
        sharing = pipe._sends._mapping if is_map else pipe._sends.gpus.sharing
        importer = sharing._importer
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
    forks: ForkServer, way: str, how: str
) -> AsyncIterator[tuple[Fork, Fork]]:
    """Start both, and wait until the sender has sent."""
    kind = way if way == "map" else usable(cast(GpuKind, way))
    transport = "map" if way == "map" else "cuda_ipc"
    async with (
        asyncio.timeout(50),
        forks.running(BEGIN + RECEIVER, kind, how) as receiver,
    ):
        url = await line_of(receiver)
        async with forks.running(BEGIN + SENDER, kind, url) as sender:
            assert await line_of(sender) == await line_of(receiver) == transport
            assert await ask(sender, "send") == "sent"
            yield sender, receiver


@WAYS
async def test_two_processes_send_through_memory(forks: ForkServer, way: str) -> None:
    device = "cpu" if way == "map" else "cuda"
    async with connected(forks, way, "take") as (sender, receiver):
        assert await line_of(receiver) == f"{device} 1.0"
        assert await line_of(receiver) == f"{device} 2.0"
        assert await ask(sender, "go") == "end"
        assert await line_of(receiver) == "end"


@DEATHS
async def test_a_sender_that_is_killed_while_it_is_read(
    forks: ForkServer, way: str
) -> None:
    async with connected(forks, way, "hold") as (sender, receiver):
        assert await line_of(receiver) == "reads"
        sender.kill()
        while (said := await line_of(receiver)) == "reads":
            pass
        assert said == "PeerLost"


@DEATHS
async def test_a_receiver_that_is_killed_while_it_reads(
    forks: ForkServer, way: str
) -> None:
    async with connected(forks, way, "hold") as (sender, receiver):
        assert await line_of(receiver) == "reads"
        assert await ask(sender, "held") == "2 True"
        receiver.kill()
        while await ask(sender, "held") != "0 False":
            pass
        assert await ask(sender, "go") == "PipeBroken"
