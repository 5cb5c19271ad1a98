"""Engines on a GPU that share a store, which is in host memory."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import pytest

from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.config import KVTransferConfig
from asynckv.connectors.store.worker import StoreWorker
from asynckv.testing.blocked import until
from harness.engines.toy_engine import ToyEngine
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import free_urls, make_engine, toy_shape
from harness.fake_devices import FakeDevice, fake_device_of
from harness.fake_gpus import FakeGpus

MODEL: Final = ToyModel(layers=2, head_dim=256)
"""A block is larger than what rides with a frame."""

Engines = tuple[ToyEngine, ToyEngine]


@pytest.fixture
async def gpu() -> AsyncIterator[FakeDevice]:
    gpus = FakeGpus(1, seed=3, max_delay=2)
    yield fake_device_of(gpus.process())
    await until(lambda: not any("asynckv-" in t.name for t in threading.enumerate()))
    assert not gpus.faults
    gpus.close()


@asynccontextmanager
async def sharing(
    saves_on: FakeDevice | None, loads_on: FakeDevice | None, device: str = "cpu"
) -> AsyncIterator[Engines]:
    (url,) = free_urls(1)
    config = KVTransferConfig(
        kv_connector="StoreConnector",
        kv_role="kv_both",
        kv_buffer_device=device,
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"store": url, "fingerprint": "toy"},
    )
    shape = toy_shape(MODEL)
    async with (
        StoreBuffer("16MiB", fingerprint="toy") as store,
        serve(url, store=store),
        make_engine("one", config, shape, MODEL, chunk=32, gpu=saves_on) as saver,
        make_engine("two", config, shape, MODEL, gpu=loads_on) as loader,
    ):
        yield saver, loader


def prompt(seed: int = 1) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(50_000) for _ in range(70)]


def worker_of(engine: ToyEngine) -> StoreWorker:
    (worker,) = engine.workers
    assert isinstance(worker, StoreWorker)
    return worker


async def share(engines: Engines, seed: int = 1) -> int:
    """Return how many tokens were not computed again."""
    saver, loader = engines
    tokens = prompt(seed)
    await saver.generate(tokens, 2, request_id=f"a{seed}")
    await worker_of(saver).flush()
    output = await loader.generate(tokens, 2, request_id=f"b{seed}")
    assert output.tokens == MODEL.generate(tokens, 2)
    await loader.quiet()
    return output.external_tokens


@pytest.mark.parametrize(
    ("saves", "loads", "device"),
    [
        (True, True, "cpu"),
        (True, True, "cuda"),
        (True, False, "cpu"),
        (False, True, "cpu"),
    ],
)
async def test_blocks_of_a_gpu_go_through_a_store_in_host_memory(
    gpu: FakeDevice, saves: bool, loads: bool, device: str
) -> None:
    places = gpu if saves else None, gpu if loads else None
    async with sharing(*places, device) as engines:
        assert await share(engines) == 64
        assert worker_of(engines[0]).statistics().unsaved_blocks == 0


async def test_aborted_loads_stop_no_later_one(gpu: FakeDevice) -> None:
    async with sharing(gpu, gpu) as engines:
        await share(engines)
        for number in range(12):
            loading = engines[1].generate(prompt(), 2, request_id=f"{number}")
            task = asyncio.create_task(loading)
            for _ in range(4 * number):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        await engines[1].quiet()
        assert await share(engines, 2) == 64
