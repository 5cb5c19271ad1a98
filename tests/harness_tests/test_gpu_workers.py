"""A prompt goes from one process to another on one GPU, by their connectors."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator

import pytest
import torch

from asynckv.connectors.p2p.worker import P2PWorker
from asynckv.connectors.requests import P2PMetadata
from asynckv.testing.blocked import until
from harness.children import line_of
from harness.engines.toy_pairs import free_urls
from harness.forks import Fork, ForkServer
from harness.gpu_processes import GPU_KINDS, GpuKind, usable
from harness.gpu_workers import (
    LOADED,
    SAVED,
    content_of,
    load_request,
    worker_on,
)

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

Decoding = tuple[P2PWorker, dict[str, torch.Tensor], Fork]
Pushed = tuple[P2PWorker, dict[str, torch.Tensor], Fork, str]


RUN = "import runpy\nrunpy.run_module('harness.gpu_workers', run_name='__main__')"


@contextlib.asynccontextmanager
async def other(
    forks: ForkServer, kind: GpuKind, url: str, how: str = ""
) -> AsyncIterator[Fork]:
    """Run another process with a worker: it ends with its input, or is killed."""
    async with forks.running(RUN, kind, url, how) as process:
        yield process
        process.stdin.close()
        assert await process.wait() in (0, -signal.SIGKILL)


@pytest.fixture(params=GPU_KINDS)
async def decoding(
    forks: ForkServer, request: pytest.FixtureRequest
) -> AsyncIterator[Decoding]:
    """A worker on the GPU of another process, which has saved the prompt."""
    kind, (url,) = usable(request.param), free_urls(1)
    async with other(forks, kind, url) as process:
        assert await line_of(process) == "saved"
        worker, caches = worker_on(kind, "kv_consumer", url)
        async with worker:
            await worker.start()
            yield worker, caches, process


async def load(worker: P2PWorker, name: str) -> dict[str, str]:
    """Load it, and return why it failed, if it did."""
    worker.bind_connector_metadata(P2PMetadata(loads=(load_request(name),)))
    await worker.start_load_kv()
    await until(lambda: not worker.statistics().loading)
    worker.clear_connector_metadata()
    return dict(worker.get_finished().reasons)


async def test_blocks_are_read_where_the_other_process_keeps_them(
    decoding: Decoding,
) -> None:
    worker, caches, _ = decoding
    assert await load(worker, "t") == {}
    (line,) = worker.routes.peers._lines.values()
    assert (await line.peer()).transport == "cuda_ipc"
    for layer, cache in caches.items():
        assert torch.equal(cache.cpu()[list(LOADED)], content_of(layer)[list(SAVED)])
        assert not cache.cpu()[[1, 2, 5, 7, 8]].any()


@contextlib.asynccontextmanager
async def pushed_to(
    forks: ForkServer, kind: GpuKind, how: str
) -> AsyncIterator[Pushed]:
    """A worker to which another process pushes, and what that says of it."""
    (url,) = free_urls(1)
    worker, caches = worker_on(kind, "kv_consumer", url, direction="push")
    async with worker:
        await worker.start()
        async with other(forks, kind, url, how) as process:
            yield worker, caches, process, await line_of(process)


@pytest.mark.chaos
@pytest.mark.parametrize("kind", GPU_KINDS)
async def test_what_another_process_pushes_never_comes_to_its_host(
    forks: ForkServer, kind: GpuKind
) -> None:
    async with pushed_to(forks, usable(kind), "push") as (worker, caches, _, said):
        assert said == "saved cuda_ipc 0"
        assert await load(worker, "t") == {}
        for layer, cache in caches.items():
            expected = content_of(layer)[list(SAVED)]
            assert torch.equal(cache.cpu()[list(LOADED)], expected)


@pytest.mark.chaos
@pytest.mark.parametrize("kind", GPU_KINDS)
async def test_a_process_that_is_killed_while_it_pushes_holds_nothing(
    forks: ForkServer, kind: GpuKind
) -> None:
    async with pushed_to(forks, usable(kind), "half") as (worker, _, process, said):
        assert said == "begun" and await load(worker, "first") == {}
        loading = asyncio.create_task(load(worker, "t"))
        buffer = worker.routes.buffer
        assert buffer is not None and buffer.is_on_gpu
        await until(lambda: buffer.statistics().used_bytes > 0)
        process.kill()
        assert "t" in await loading
        await until(lambda: not buffer.statistics().used_bytes)
        assert worker._device is None or not opened_by(worker)


def opened_by(worker: P2PWorker) -> int:
    """Return how many allocations of others a worker has open on its fake GPU."""
    cuda = worker._device.open().cuda if worker._device is not None else None
    return len(getattr(cuda, "_opened", ()))


@pytest.mark.chaos
async def test_a_process_that_was_killed_fails_loads_and_holds_nothing(
    decoding: Decoding,
) -> None:
    worker, caches, process = decoding
    (find, _), *_ = worker.routes.sources(load_request("t"))[1].values()
    await find()  # its memory is open here
    process.kill()
    await process.wait()
    assert "t" in await load(worker, "t")
    assert not any(cache.cpu().any() for cache in caches.values())
