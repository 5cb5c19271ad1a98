"""Blocks that leave one process for a store of another on one GPU, which may die."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from typing import Final

import pytest
import torch

from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.spool import Spool
from asynckv.connectors.store_orders import StoreMetadata, StoreOrder
from asynckv.connectors.store_worker import StoreWorker
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.testing.blocked import until
from asynckv.testing.children import line_of
from asynckv.testing.fake_devices import fake_device_of, stagings_of
from asynckv.testing.fake_gpus import FakeGpus
from asynckv.testing.gpu_processes import GpuKind, running
from asynckv.testing.shared_puts import SharedPuts

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles"),
]

STORE: Final = """
async def main():
    async with (
        asynckv.StoreBuffer("16MiB", fingerprint="toy", device=open_device()) as store,
        asynckv.serve("tcp://127.0.0.1:0", store=store) as server,
    ):
        tell(server.url)
        await order()
asyncio.run(main())
"""
SHAPE: Final = (4, 16, 8, 128)
BLOCKS: Final = (2, 0)


@pytest.fixture
async def store(gpu_kind: GpuKind) -> AsyncIterator[Process]:
    async with asyncio.timeout(50), running(STORE, gpu_kind) as process:
        yield process


def content() -> torch.Tensor:
    return (torch.arange(torch.Size(SHAPE).numel()) % 9973).float().view(SHAPE)


@contextlib.asynccontextmanager
async def working(
    kind: GpuKind, url: str
) -> AsyncIterator[tuple[StoreWorker, torch.Tensor]]:
    """Yield a worker on that GPU, and its cache."""
    config = KVTransferConfig(
        kv_connector="StoreConnector",
        kv_role="kv_both",
        kv_buffer_size="16MiB",
        kv_buffer_device="cuda:0",
        kv_connector_extra_config={"store": url, "fingerprint": "toy"},
    )
    engine = KVEngine(engine_id="E", block_size=16)
    if kind == "real":
        worker, cache = StoreWorker(config, engine), content().cuda()
    else:
        gpu = fake_device_of(FakeGpus().process())
        stagings, device = stagings_of(gpu), gpu.device
        worker = StoreWorker(config, engine, stagings=stagings, device=device)
        cache = gpu.tensor(content())
    async with worker:
        worker.register_kv_caches({"layer": cache})
        await worker.start()
        await save(worker, "first")  # dials
        await worker.flush()
        yield worker, cache


async def save(worker: StoreWorker, name: str) -> None:
    orders = StoreMetadata(saves=(StoreOrder(name, named(name), (BLOCKS,)),))
    worker.bind_connector_metadata(orders)
    await worker.wait_for_save()
    worker.clear_connector_metadata()


def named(name: str) -> tuple[str, ...]:
    return tuple(f"{name} {number}" for number in range(len(BLOCKS)))


def puts_of(worker: StoreWorker) -> SharedPuts:
    peer = worker._line._line._peer
    assert peer is not None
    return SharedPuts(peer)


@pytest.mark.chaos
async def test_blocks_leave_for_a_store_of_another_process_within_the_gpu(
    gpu_kind: GpuKind, store: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*args: object) -> None:
        raise AssertionError("a block came to the host")

    async with working(gpu_kind, await line_of(store)) as (worker, cache):
        monkeypatch.setattr(Spool, "gather", refuse)
        await save(worker, "second")
        await worker.flush()
        assert worker.statistics().saved_blocks == 2 * len(BLOCKS)
        assert puts_of(worker).has_shown
        await until(lambda: not puts_of(worker).staged_bytes)
        cache.zero_()
        loads = (StoreOrder("load", named("second"), ((1, 3),)),)
        worker.bind_connector_metadata(StoreMetadata(loads=loads))
        await worker.start_load_kv()
        await until(lambda: not worker.statistics().loading)
        assert worker.get_finished().reasons == {}
        assert torch.equal(cache.cpu()[[1, 3]], content()[list(BLOCKS)])


@pytest.mark.trust
async def test_a_store_that_is_killed_leaves_no_memory_with_who_saves(
    gpu_kind: GpuKind, store: Process
) -> None:
    async with working(gpu_kind, await line_of(store)) as (worker, _):
        puts = puts_of(worker)
        store.send_signal(signal.SIGSTOP)
        await save(worker, "second")
        assert puts.staged_bytes > 0 and worker.statistics().saving == len(BLOCKS)
        store.kill()
        await worker.flush()
        assert worker.statistics().unsaved_blocks == len(BLOCKS)
        await until(lambda: not puts.staged_bytes)
