"""Engines that share a store, whose blocks come to their caches by way of a GPU."""

from __future__ import annotations

import asyncio
import random
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec
import pytest
import torch

from asynckv.buffers.remote import Peer
from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.config import KVRole, KVTransferConfig
from asynckv.connectors import store_saving
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.spool import _MARK_NBYTES, Spool
from asynckv.connectors.store_worker import StoreWorker
from asynckv.errors import ConfigError
from asynckv.tensors.device_pages import DevicePages
from asynckv.tensors.lending import Lending
from asynckv.testing.blocked import until
from asynckv.testing.engines.toy_engine import ToyEngine
from asynckv.testing.engines.toy_model import ToyModel
from asynckv.testing.engines.toy_pairs import free_urls, make_engine, toy_shape
from asynckv.testing.fake_devices import fake_device_of, stagings_of
from asynckv.testing.fake_gpus import FakeGpus
from asynckv.types import TensorSpec

MODEL: Final = ToyModel(layers=2, head_dim=256)
"""A block is larger than what stays in host memory."""
BLOCK_NBYTES: Final = 2 * 2 * 16 * MODEL.heads * 256 * 4

Engines = tuple[ToyEngine, ToyEngine]


@pytest.fixture
async def gpus() -> AsyncIterator[FakeGpus]:
    gpus = FakeGpus(2, seed=3, max_delay=2)
    yield gpus
    await until(lambda: not any("asynckv-" in t.name for t in threading.enumerate()))
    assert not gpus.faults
    gpus.close()


@asynccontextmanager
async def sharing(
    gpus: FakeGpus,
    at: int | None,
    size: str = "16MiB",
    saves_as: KVRole = "kv_both",
    loads_as: KVRole = "kv_consumer",
    push_size: str = "2MiB",
) -> AsyncIterator[Engines]:
    """Two engines on the first GPU; the store is on that of the number ``at``."""
    (url,) = free_urls(1)
    config = KVTransferConfig(
        kv_connector="StoreConnector",
        kv_role="kv_both",
        kv_buffer_device="cuda",
        kv_buffer_size=size,
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            "store": url,
            "fingerprint": "toy",
            "push_buffer_size": push_size,
        },
    )
    device = None if at is None else fake_device_of(gpus.process(), at).device
    one, two = fake_device_of(gpus.process()), fake_device_of(gpus.process())
    shape = toy_shape(MODEL)
    async with (
        StoreBuffer("16MiB", fingerprint="toy", device=device) as store,
        serve(url, store=store),
        make_engine(
            "one",
            msgspec.structs.replace(config, kv_role=saves_as),
            *(shape, MODEL),
            chunk=32,
            gpu=one,
        ) as saver,
        make_engine(
            "two",
            msgspec.structs.replace(config, kv_role=loads_as),
            *(shape, MODEL),
            gpu=two,
        ) as loader,
    ):
        yield saver, loader


def prompt(seed: int = 1) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(50_000) for _ in range(70)]


def worker_of(engine: ToyEngine) -> StoreWorker:
    (worker,) = engine.workers
    assert isinstance(worker, StoreWorker)
    return worker


def peer_of(engine: ToyEngine) -> Peer:
    peer = worker_of(engine)._line._line._peer
    assert peer is not None
    return peer


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


def landing_of(engine: ToyEngine) -> DevicePages:
    """Return the memory of a GPU in which values land."""
    memory = peer_of(engine).on_gpu
    assert memory is not None and memory.device_pages is not None
    memory.arena.fits([])  # looks for what is free by now
    return memory.device_pages


def is_free(engine: ToyEngine) -> bool:
    pages = landing_of(engine)
    return pages.free_bytes == pages.nbytes


@pytest.mark.parametrize(
    ("at", "transport"), [(None, "inline"), (0, "cuda_ipc"), (1, "nccl")]
)
async def test_blocks_come_to_the_gpu_wherever_the_store_is(
    gpus: FakeGpus, at: int | None, transport: str
) -> None:
    async with sharing(gpus, at) as engines:
        assert await share(engines) == 64
        assert peer_of(engines[1]).transport == transport
        await until(lambda: is_free(engines[1]))


async def test_as_much_of_the_gpu_is_taken_as_blocks_come_at_once(
    gpus: FakeGpus,
) -> None:
    async with sharing(gpus, None) as engines:
        await share(engines)
        assert 1 <= landing_of(engines[1]).nbytes / (32 * BLOCK_NBYTES) < 1.1


async def test_who_only_stores_takes_what_blocks_leave_through(gpus: FakeGpus) -> None:
    async with sharing(gpus, None, saves_as="kv_producer") as engines:
        assert await share(engines) == 64
        assert landing_of(engines[0]).nbytes == 2**21
        assert landing_of(engines[1]).nbytes


@pytest.mark.parametrize("at", [0, 1])
async def test_what_who_only_stores_saves_leaves_from_gpu_to_gpu(
    gpus: FakeGpus, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*args: object) -> None:
        raise AssertionError("a block came to the host")

    async with sharing(gpus, at, saves_as="kv_producer") as engines:
        await share(engines)  # dials
        monkeypatch.setattr(Spool, "gather", refuse)
        assert await share(engines, 2) == 64
        assert worker_of(engines[0]).statistics().unsaved_blocks == 0


async def test_who_only_stores_may_take_nothing_of_the_gpu(gpus: FakeGpus) -> None:
    async with sharing(gpus, None, saves_as="kv_producer", push_size="0") as engines:
        assert await share(engines) == 64
        assert peer_of(engines[0]).on_gpu is None


async def test_as_much_is_taken_as_may_be_on_its_way_at_most(
    gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_saving, "_STAGED_BLOCKS", 5)
    monkeypatch.setattr(store_saving, "_STAGED_BYTES", 1)
    async with sharing(gpus, None, saves_as="kv_producer") as engines:
        await share(engines)
        assert 5 <= landing_of(engines[0]).nbytes / BLOCK_NBYTES < 5.1


@pytest.mark.parametrize(
    ("role", "nbytes"), [("kv_consumer", 2**20), ("kv_both", 2**21)]
)
async def test_no_more_is_taken_than_was_configured(
    gpus: FakeGpus, role: KVRole, nbytes: int
) -> None:
    async with sharing(gpus, None, "1MiB", loads_as=role) as engines:
        assert await share(engines) == 64
        assert landing_of(engines[1]).nbytes == nbytes


@pytest.mark.parametrize(("blocks", "at_once"), [(1, 1), (2, 1), (4, 2)])
async def test_beside_that_there_is_half_as_much_or_a_block(
    gpus: FakeGpus, blocks: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside, most, ordinary = weakref.WeakSet[torch.Tensor](), 0, Lending._ordinary

    def make(lending: Lending, spec: TensorSpec) -> torch.Tensor:
        nonlocal most
        tensor = ordinary(lending, spec)
        if tensor.is_cuda:
            outside.add(tensor)
            most = max(most, sum(one.nbytes for one in outside))
        return tensor

    monkeypatch.setattr(Lending, "_ordinary", make)
    async with sharing(gpus, None, str(blocks * (BLOCK_NBYTES + 4096))) as engines:
        assert await share(engines) == 64
        await until(lambda: is_free(engines[1]))
    assert most <= at_once * (BLOCK_NBYTES + _MARK_NBYTES)


async def test_aborted_loads_give_all_memory_back(gpus: FakeGpus) -> None:
    async with sharing(gpus, 0) as engines:
        await share(engines)
        for number in range(12):
            name = f"{number}"
            loading = engines[1].generate(prompt(), 2, request_id=name)
            task = asyncio.create_task(loading)
            for _ in range(4 * number):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        await engines[1].quiet()
        assert await share(engines, 2) == 64
        await until(lambda: is_free(engines[1]))


async def test_a_value_that_is_no_block_keeps_no_memory(gpus: FakeGpus) -> None:
    async with sharing(gpus, 0) as engines:
        await share(engines)
        worker, peer = worker_of(engines[1]), peer_of(engines[1])
        await peer.store.put("other", torch.zeros(BLOCK_NBYTES, dtype=torch.uint8))
        spool = worker._spooled()

        async def scatter(value: torch.Tensor) -> None:
            assert value.is_cuda
            await spool.scatter(value, ((0,),), 0)

        with pytest.raises(ValueError, match="no block of") as kept:
            await worker._loading._load_block(peer.store, "other", scatter)
        await until(lambda: is_free(engines[1]))
        assert kept.value.__traceback__ is not None


async def test_caches_on_another_gpu_than_values_have_memory_on_are_refused(
    gpus: FakeGpus,
) -> None:
    def caches_at(index: int) -> dict[str, torch.Tensor]:
        return {"a": fake_device_of(process, index).tensor(torch.zeros(4, 16, 2))}

    process = gpus.process()
    config = KVTransferConfig(
        kv_role="kv_both",
        kv_buffer_device="cuda",
        kv_connector_extra_config={"store": "mem://of-two", "fingerprint": "toy"},
    )
    engine = KVEngine(engine_id="E", block_size=16)
    stagings = stagings_of(fake_device_of(process))
    async with StoreWorker(config, engine, stagings=stagings) as worker:
        worker.register_kv_caches(caches_at(0))
        worker.register_kv_caches(caches_at(0))
        with pytest.raises(
            ConfigError, match="on cuda:0, and the caches are on cuda:1"
        ):
            worker.register_kv_caches(caches_at(1))
    async with (
        StoreBuffer() as store,
        StoreWorker(config, engine, store, stagings=stagings) as worker,
    ):
        worker.register_kv_caches(caches_at(0))
        worker.register_kv_caches(caches_at(1))  # where the store is, is its affair


async def test_caches_whose_blocks_are_too_small_to_leave_need_nothing_any_more(
    gpus: FakeGpus,
) -> None:
    def caches_of(block: int) -> dict[str, torch.Tensor]:
        return {"a": gpu.tensor(torch.zeros(2, block))}

    gpu = fake_device_of(gpus.process())
    config = KVTransferConfig(
        kv_role="kv_producer",
        kv_buffer_device="cuda",
        kv_connector_extra_config={"store": "mem://small", "fingerprint": "toy"},
    )
    engine = KVEngine(engine_id="E", block_size=16)
    options: Any = {"stagings": stagings_of(gpu), "device": gpu.device}
    async with StoreWorker(config, engine, **options) as worker:
        worker.register_kv_caches(caches_of(2**16))
        assert worker._line.landing == "cuda:0"
        worker.register_kv_caches(caches_of(16))
        assert worker._line.landing is None
