"""A worker's role whose caches are on a fake GPU: the engine's thread is the test's."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from asynckv.abc import KVTransferResults
from asynckv.buffers.store import StoreBuffer
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.store_orders import StoreMetadata, StoreOrder
from asynckv.connectors.store_worker import StoreWorker
from asynckv.integrations.vllm.worker_role import WorkerRole
from asynckv.testing.fake_devices import FakeDevice, fake_device, stagings_of
from asynckv.testing.fake_gpus.gates import Gate

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
            KVTransferConfig(kv_role="kv_both"),
            ENGINE,
            StoreBuffer("1MiB"),
            stagings=stagings_of(gpu),
        ),
        tells_of_saves=False,
    )
    yield role
    role.shutdown()


class _Fill:
    """A kernel of the engine's."""

    def __init__(self, cache: torch.Tensor, values: torch.Tensor) -> None:
        self._cache, self._values = cache, values

    def run(self) -> bool:
        self._cache[: len(self._values)] = self._values
        return True


def save(role: WorkerRole, *block_ids: int) -> None:
    order = StoreOrder("s", KEYS, (block_ids,))
    role.begin_step(StoreMetadata(saves=(order,)))
    role.start_loads()
    role.end_step()


def load(role: WorkerRole, *block_ids: int) -> KVTransferResults:
    order = StoreOrder("l", KEYS, (block_ids,))
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
    save(role, 3, 1)  # and waits for it, as its blocks may be overwritten then
    gpu.tensors.stream(0).add(_Fill(cache, torch.zeros(4, 32)))
    assert not load(role, 6, 0).failed_recving
    assert torch.equal(cache.cpu()[[6, 0]], values[[3, 1]])
    assert not cache.cpu()[[1, 2, 3]].any()
    opening.join()
