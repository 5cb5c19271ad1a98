"""The other process of a benchmark: one buffer behind TCP, unix and TLS lanes; a pipe.

The baselines' raw sockets are those of ``asynckv bench``. It ends when the pipe to
its parent does.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch

import asynckv
from asynckv.cli.bench.baselines import (
    MEETING_KEY,
    BaselineServer,
    meeting_as_tensor,
)
from asynckv.cli.process import LoopName, run
from asynckv.pipes.endpoints import PipeListener
from asynckv.tensors.views import bytes_of
from asynckv.testing.certificates import Authority

__all__ = ("LARGE", "NBYTES", "TENSORS", "Places", "serving")

TENSORS, NBYTES = 64, 16 * 2**20
LARGE = [1, 2, 3]
"""The tokens of an entry of ``TENSORS`` layers of ``NBYTES`` bytes."""
_MAX_LANES = 8


@dataclasses.dataclass(frozen=True)
class Places:
    """Where the child process serves, and what TLS needs there."""

    tcp: str
    unix: str
    tls: str
    pipe: str
    pid: int
    keys: asynckv.TLS


@contextlib.contextmanager
def serving(*, large: bool = True, loop: LoopName = "auto") -> Iterator[Places]:
    """Run the other process; it holds the large entry, if that is wanted."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Authority(folder).issue()
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(
            target=_run, args=(there, folder, keys, large, loop), daemon=True
        )
        process.start()
        there.close()
        try:
            tcp, unix, tls, pipe = here.recv()
            yield Places(tcp, unix, tls, pipe, process.pid or 0, keys)
        finally:
            here.close()
            process.join(10)
            process.kill()
            process.join()


def _run(
    pipe: Connection, folder: str, keys: asynckv.TLS, large: bool, loop: LoopName
) -> None:
    run(_serve(pipe, folder, keys, large), loop)
    # The baselines' threads may hold the last of torch's memory: one that lets go of
    # it while the interpreter ends takes the process down.
    os._exit(0)


async def _serve(pipe: Connection, folder: str, keys: asynckv.TLS, large: bool) -> None:
    lookup = asynckv.LookupBuffer("2GiB", max_deliver=10**9, drain_s=0)
    layers = {str(i): _layer(i) for i in range(TENSORS)} if large else {}
    # As much memory as asynckv sends from, of the same kind: caches are fair too.
    sources = [bytes_of(layer) for layer in layers.values()]
    baselines = BaselineServer("127.0.0.1", sources)
    places = (
        "tcp://127.0.0.1:0",
        f"unix://{Path(folder) / 'socket'}",
        "tls://127.0.0.1:0",
    )
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(lookup)
        store = await stack.enter_async_context(asynckv.StoreBuffer(2**20))
        meeting = await stack.enter_async_context(baselines)
        await store.put(MEETING_KEY, meeting_as_tensor(meeting))
        if large:
            await lookup.insert(LARGE, None, layers, None, None, ttl_s=None)
        layers.clear()
        urls = []
        for place in places:
            server = asynckv.serve(
                place,
                lookup=lookup,
                store=store,
                digest="off",  # so who connects decides
                lanes=_MAX_LANES,
                tls=keys if place.startswith("tls") else None,
            )
            served = await stack.enter_async_context(server)
            urls.append(f"{served.url}?payload=inline")  # else memory is mapped
        listener = asynckv.listen_pipe("tcp://127.0.0.1:0?payload=inline")
        await stack.enter_async_context(listener)
        echoing = asyncio.create_task(_echo_forever(listener))
        stack.callback(echoing.cancel)
        pipe.send([*urls, listener.url])
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(pipe, over.set_result, None)
        await over
        asyncio.get_running_loop().remove_reader(pipe)


async def _echo_forever(listener: PipeListener) -> None:
    """Send back what comes by a pipe, one pipe after the other."""
    while True:
        async with await listener.accept() as pipe:
            with contextlib.suppress(asynckv.PeerLost):
                async for tensor in pipe:
                    await pipe.send_tensor(tensor)


def _layer(number: int) -> torch.Tensor:
    return torch.full((NBYTES,), number, dtype=torch.uint8)
