"""Two processes with a pipe within one GPU, of which one is killed."""

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

COMMON = """
def hold_reads(pipe):
    from asynckv.transfers.read_route import IpcRoute
    async def hold(*_):
        tell("reads")
        await asyncio.Event().wait()
    IpcRoute._copy = hold

async def settle(pipe):
    await pipe.gpus_settled()
    while pipe.transport != "cuda_ipc":
        await asyncio.sleep(0.01)
"""
RECEIVER = (
    COMMON
    + """
async def main():
    device = open_device()
    async with (
        asynckv.listen_pipe("tcp://127.0.0.1:0", device=device, max_bytes="16MiB") as l,
    ):
        tell(l.url)
        async with await l.accept() as pipe:
            await settle(pipe)
            if sys.argv[2] == "hold":
                hold_reads(pipe)
            tell(pipe.transport)
            async for tensor in pipe:
                tell(tensor.device, tensor.cpu().float().mean().item())
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
    device = open_device()
    async with asynckv.open_pipe(sys.argv[2], device=device, max_bytes="16MiB") as pipe:
        await settle(pipe)
        tell(pipe.transport)
        await order()
        importer = pipe._sends.gpus.sharing._importer
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
    gpu_kind: GpuKind, how: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.subprocess.Process]]:
    """Start both, and wait until the sender has sent."""
    async with asyncio.timeout(50), running(RECEIVER, gpu_kind, how) as receiver:
        url = await line_of(receiver)
        async with running(SENDER, gpu_kind, url) as sender:
            assert await line_of(sender) == await line_of(receiver) == "cuda_ipc"
            assert await ask(sender, "send") == "sent"
            yield sender, receiver


async def test_two_processes_send_within_one_gpu(gpu_kind: GpuKind) -> None:
    async with connected(gpu_kind, "take") as (sender, receiver):
        assert await line_of(receiver) == "cuda:0 1.0"
        assert await line_of(receiver) == "cuda:0 2.0"
        assert await ask(sender, "go") == "end"
        assert await line_of(receiver) == "end"


@pytest.mark.trust
async def test_a_sender_that_is_killed_while_it_is_read(gpu_kind: GpuKind) -> None:
    async with connected(gpu_kind, "hold") as (sender, receiver):
        assert await line_of(receiver) == "reads"
        sender.kill()
        while (said := await line_of(receiver)) == "reads":
            pass
        assert said == "PeerLost"


@pytest.mark.trust
async def test_a_receiver_that_is_killed_while_it_reads(gpu_kind: GpuKind) -> None:
    async with connected(gpu_kind, "hold") as (sender, receiver):
        assert await line_of(receiver) == "reads"
        assert await ask(sender, "held") == "2 True"
        receiver.kill()
        while await ask(sender, "held") != "0 False":
            pass
        assert await ask(sender, "go") == "PipeBroken"
