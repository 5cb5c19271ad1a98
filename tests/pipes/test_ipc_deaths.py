"""Two processes with a pipe within one GPU, of which one is killed."""

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

COMMON = """
import gc
from asynckv.links.sharing import MapHolder

async def order():
    return (await asyncio.to_thread(sys.stdin.readline)).strip()

def tell(*words):
    print(*words, flush=True)

def hold_reads(pipe):
    sharing = pipe._sends.gpus.sharing
    copy = sharing.copy
    async def hold(source, target):
        tell("reads")
        await asyncio.Event().wait()
    sharing.copy = hold

async def settle(pipe):
    await pipe.gpus_settled()
    while pipe.transport != "cuda_ipc":
        await asyncio.sleep(0.01)
    tell(pipe.transport)
"""
RECEIVER = """
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
            async for tensor in pipe:
                tell(tensor.device, tensor.cpu().float().mean().item())
        tell("end")
try:
    asyncio.run(main())
except asynckv.PeerLost:
    tell("PeerLost")
"""
SENDER = """
async def main():
    device = open_device()
    async with asynckv.open_pipe(sys.argv[2], device=device, max_bytes="16MiB") as pipe:
        await settle(pipe)
        holder = pipe._sends.gpus.sharing._holder
        for value in (1.0, 2.0):
            await pipe.send_tensor(torch.full((2**20,), value))
        tell("sent")
        while (word := await order()) != "go":
            tell(len(holder._pins), holder._connection is not None)
    tell("end")
try:
    asyncio.run(main())
except asynckv.PipeBroken:
    tell("PipeBroken")
"""


@contextlib.asynccontextmanager
async def running(
    code: str, kind: str, *args: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", BEGIN + COMMON + code, kind, *args),
        stdin=pipe,
        stdout=pipe,
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


@contextlib.asynccontextmanager
async def connected(
    kind: GpuKind, how: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.subprocess.Process]]:
    """Start both, and wait until the sender has sent."""
    async with asyncio.timeout(50), running(RECEIVER, kind, how) as receiver:
        url = await line_of(receiver)
        async with running(SENDER, kind, url) as sender:
            assert await line_of(sender) == await line_of(receiver) == "cuda_ipc"
            assert await line_of(sender) == "sent"
            yield sender, receiver


async def test_two_processes_send_within_one_gpu(kind: GpuKind) -> None:
    async with connected(kind, "take") as (sender, receiver):
        assert await line_of(receiver) == "cuda:0 1.0"
        assert await line_of(receiver) == "cuda:0 2.0"
        assert await ask(sender, "go") == "end"
        assert await line_of(receiver) == "end"


@pytest.mark.trust
async def test_a_sender_that_is_killed_while_it_is_read(kind: GpuKind) -> None:
    async with connected(kind, "hold") as (sender, receiver):
        assert await line_of(receiver) == "reads"
        sender.kill()
        while (said := await line_of(receiver)) == "reads":
            pass
        assert said == "PeerLost"


@pytest.mark.trust
async def test_a_receiver_that_is_killed_while_it_reads(kind: GpuKind) -> None:
    async with connected(kind, "hold") as (sender, receiver):
        assert await line_of(receiver) == "reads"
        assert await ask(sender, "held") == "2 True"
        receiver.kill()
        while await ask(sender, "held") != "0 False":
            pass
        assert await ask(sender, "go") == "PipeBroken"
