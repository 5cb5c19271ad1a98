"""A worker's role whose caches are on a fake GPU: the engine's thread is the test's."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from asynckv.abc import KVTransferResults
from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.config import KVRole, KVTransferConfig
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.p2p.worker import P2PWorker
from asynckv.connectors.requests import P2PMetadata, StoreMetadata, StoreRequest
from asynckv.connectors.store.worker import StoreWorker
from asynckv.integrations.bridge import Bridge
from asynckv.integrations.vllm.worker_role import WorkerRole
from asynckv.testing.blocked import until
from harness.engines.toy_pairs import free_urls
from harness.fake_devices import FakeDevice, fake_device, lanes_of
from harness.fake_gpus import FakeGpus
from harness.fake_gpus.gates import Gate
from harness.gpu_workers import (
    LOADED,
    SAVED,
    content_of,
    load_request,
    save_request,
    worker_on,
)

ENGINE = KVEngine(engine_id="E", block_size=4)
KEYS = ("k0", "k1")


@pytest.fixture
def gpu() -> Iterator[FakeDevice]:
    with fake_device(seed=7, max_delay=2) as gpu:
        yield gpu
        while any("asynckv-" in thread.name for thread in threading.enumerate()):
            threading.Event().wait(0.001)


@pytest.fixture
def role(gpu: FakeDevice) -> Iterator[WorkerRole]:
    role = WorkerRole(
        "on a GPU",
        lambda: StoreWorker(
            KVTransferConfig(kv_connector_extra_config={"chunk_tokens": 4}),
            ENGINE,
            StoreBuffer("1MiB"),
            lanes=lanes_of(gpu),
        ),
        reports_saves=False,
    )
    yield role
    role.shutdown()


class _Engine(NamedTuple):
    role: WorkerRole
    worker: P2PWorker
    caches: dict[str, torch.Tensor]


class _Fill:
    """A kernel of the engine's."""

    def __init__(self, cache: torch.Tensor, values: torch.Tensor) -> None:
        self._cache, self._values = cache, values

    def run(self) -> bool:
        self._cache[: len(self._values)] = self._values
        return True


def save(role: WorkerRole, *block_ids: int) -> None:
    order = StoreRequest("s", KEYS, (block_ids,))
    role.begin_step(StoreMetadata(saves=(order,)))
    role.start_loads()
    role.end_step()


def load(role: WorkerRole, *block_ids: int) -> KVTransferResults:
    order = StoreRequest("l", KEYS, (block_ids,))
    role.begin_step(StoreMetadata(loads=(order,)))
    role.start_loads()
    role.end_step()
    ended = role.results()
    while not ended.finished_recving:
        threading.Event().wait(0.001)
        ended |= role.results()
    return ended


def test_what_the_engine_had_queued_is_saved_and_loaded(
    gpu: FakeDevice, role: WorkerRole
) -> None:
    values = torch.arange(128.0).view(4, 32)
    cache = gpu.tensor(torch.zeros(8, 32))
    role.register({"layer": cache}, {"layer": 0})
    gate = Gate()
    gpu.tensors.stream(0).add(gate)
    gpu.tensors.stream(0).add(_Fill(cache, values))
    opening = threading.Timer(0.05, gate.open)
    opening.start()
    save(role, 3, 1)
    role.wait_released({"s"})  # its blocks are overwritten by what comes next
    gpu.tensors.stream(0).add(_Fill(cache, torch.zeros(4, 32)))
    assert not load(role, 6, 0).failed_recving
    assert torch.equal(cache.cpu()[[6, 0]], values[[3, 1]])
    assert not cache.cpu()[[1, 2, 3]].any()
    opening.join()


def run_step(role: WorkerRole, orders: P2PMetadata) -> None:
    role.begin_step(orders)
    role.start_loads()
    role.end_step()


def until_ended(role: WorkerRole) -> KVTransferResults:
    ended = role.results()
    while not (ended.finished_sending or ended.finished_recving):
        threading.Event().wait(0.001)
        ended |= role.results()
    return ended


def _same(worker: P2PWorker) -> P2PWorker:
    return worker


def engines(direction: str, gpus: FakeGpus) -> Iterator[_Engine]:
    """Return the one that prefills and the one that decodes, on one GPU."""
    (url,) = free_urls(1)
    sides: tuple[KVRole, ...] = ("kv_producer", "kv_consumer")
    for side in sides:
        worker, caches = worker_on("fake", side, url, gpus=gpus, direction=direction)
        role = WorkerRole(side, functools.partial(_same, worker))
        yield _Engine(role, worker, caches)


@pytest.mark.parametrize("direction", ["pull", "push"])
def test_what_waits_for_another_engine_waits_on_a_gpu(direction: str) -> None:
    gpus = FakeGpus(max_delay=2)
    prefill, decode = engines(direction, gpus)
    serves = prefill if direction == "pull" else decode
    for one in (prefill, decode):
        one.role.register(one.caches, dict.fromkeys(one.caches, 0))
    buffer = serves.worker.routes.buffer
    assert buffer is not None and buffer.device == "cuda:0"
    run_step(prefill.role, P2PMetadata(saves=(save_request("t"),)))
    run_step(decode.role, P2PMetadata(loads=(load_request("t"),)))
    assert not until_ended(decode.role).failed_recving
    assert not until_ended(prefill.role).failed_sending
    for layer, cache in decode.caches.items():
        assert torch.equal(cache.cpu()[list(LOADED)], content_of(layer)[list(SAVED)])
    for one in (decode, prefill):  # whose memory it may have open
        one.role.shutdown()
    gpus.close()


def test_what_a_store_has_is_loaded_into_caches_on_a_gpu(gpu: FakeDevice) -> None:
    (url,), bridge = free_urls(1), Bridge[None]("store")
    store = StoreBuffer("4MiB", fingerprint="m")
    bridge.enter(lambda: store, timeout_s=10)
    bridge.enter(lambda: serve(url, store=store), timeout_s=10)
    extra: dict[str, object] = {"store": url, "fingerprint": "m", "chunk_tokens": 4}
    config = KVTransferConfig(kv_role="kv_both", kv_connector_extra_config=extra)
    worker = StoreWorker(config, ENGINE, lanes=lanes_of(gpu))
    role = WorkerRole("of a store", lambda: worker, reports_saves=False)
    values = torch.arange(8.0 * 64 * 1024).view(8, 64 * 1024)
    cache = gpu.tensor(values)
    role.register({"layer": cache}, {"layer": 0})
    save(role, 3, 1)
    bridge.run(lambda: stored(store), timeout_s=10)
    assert not load(role, 6, 0).failed_recving
    assert torch.equal(cache.cpu()[[6, 0]], values[[3, 1]])
    role.shutdown()
    bridge.shutdown()


async def stored(store: StoreBuffer) -> None:
    await until(lambda: store.statistics().keys > len(KEYS))  # and what they are of
