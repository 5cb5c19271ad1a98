"""Toy engines with caches on fake GPUs, and every byte that goes between them."""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.config import KVTransferConfig
from asynckv.connectors.caches import BlockMoves
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.p2p.worker import P2PWorker
from asynckv.connectors.requests import P2PMetadata
from asynckv.connectors.store.worker import StoreWorker
from asynckv.devices.cuda import Event
from asynckv.errors import ConfigError, GPUFailed
from asynckv.parallel.shapes import EngineShape
from asynckv.testing.blocked import until
from harness.cancellations.connectors.grounds import open_p2p, until_saved
from harness.engines.toy_engine import ToyEngine
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import make_engine, pair_configs, toy_shape
from harness.fake_devices import FakeDevice, fake_device
from harness.fake_gpus.gates import Gate

MODEL = ToyModel()
NAMES = itertools.count()
PREFILL = {"do_remote_decode": True}

Pair = tuple[ToyEngine, ToyEngine]


@pytest.fixture
async def gpu() -> AsyncIterator[FakeDevice]:
    with fake_device(seed=3, max_delay=2) as gpu:
        yield gpu
        await until(
            lambda: not any("asynckv-" in t.name for t in threading.enumerate())
        )


def prompt(length: int = 70, seed: int = 1) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(50_000) for _ in range(length)]


@asynccontextmanager
async def pair_of(
    gpus: tuple[FakeDevice | None, FakeDevice | None],
    p: EngineShape | None = None,
    d: EngineShape | None = None,
    **extra: object,
) -> AsyncIterator[Pair]:
    p, d, name = p or toy_shape(MODEL), d or toy_shape(MODEL), next(NAMES)
    urls = [
        [
            f"mem://gpu{side}{name}" + (f".{rank}" if rank else "")
            for rank in range(size)
        ]
        for side, size in (("P", p.tp_size), ("D", d.tp_size))
    ]
    configs = pair_configs(urls[0], urls[1], extra)
    async with (
        make_engine("P", configs[0], p, MODEL, chunk=32, gpu=gpus[0]) as prefill,
        make_engine("D", configs[1], d, MODEL, gpu=gpus[1]) as decode,
    ):
        yield prefill, decode


async def hand_over(pair: Pair, tokens: list[int], name: str = "r") -> int:
    """Return how many tokens were not computed again."""
    prefill, decode = pair
    first = await prefill.generate(
        tokens, request_id=f"{name}-p", kv_transfer_params=PREFILL
    )
    assert first.kv_transfer_params is not None
    last = await decode.generate(
        tokens, 3, request_id=name, kv_transfer_params=first.kv_transfer_params
    )
    assert last.tokens == MODEL.generate(tokens, 3)
    return last.external_tokens


def is_idle(worker: P2PWorker) -> bool:
    now = worker.statistics()
    return not (now.releasing or now.saving or now.loading or now.staged_bytes)


async def all_quiet(pair: Pair) -> None:
    for engine in pair:
        await engine.quiet()
        for worker in engine.workers:
            assert isinstance(worker, P2PWorker)
            await until(functools.partial(is_idle, worker))
        assert engine.unknown_completions == 0
        assert engine.blocks_in_use == 0


@pytest.mark.parametrize("direction", ["push", "pull"])
@pytest.mark.parametrize("where", ["both", "prefill", "decode"])
async def test_a_prompt_goes_from_engine_to_engine(
    gpu: FakeDevice, direction: str, where: str
) -> None:
    gpus = gpu if where != "decode" else None, gpu if where != "prefill" else None
    async with pair_of(gpus, direction=direction) as pair:
        assert await hand_over(pair, prompt()) == 70
        await all_quiet(pair)
        assert gpu.process.cuda.launches


@pytest.mark.parametrize(("p", "d"), [(2, 1), (1, 2)])
async def test_heads_of_several_ranks_come_to_where_they_belong(
    gpu: FakeDevice, p: int, d: int
) -> None:
    shapes = toy_shape(MODEL, tp_size=p), toy_shape(MODEL, tp_size=d, block_size=8)
    async with pair_of((gpu, gpu), *shapes) as pair:
        assert await hand_over(pair, prompt()) > 0
        await all_quiet(pair)


async def test_nothing_is_read_before_it_is_computed(gpu: FakeDevice) -> None:
    async with pair_of((gpu, None)) as pair:
        gate = Gate()
        gpu.tensors.stream(0).add(gate)
        first = pair[0].generate(prompt(), request_id="p", kv_transfer_params=PREFILL)
        computing = asyncio.create_task(first)
        (worker,) = pair[0].workers
        assert isinstance(worker, P2PWorker)
        await until(lambda: worker.statistics().saving == 1)
        moves = worker._registered()
        for blocks in moves.caches.blocks(MODEL.layer_names[0], ((0,),)).values():
            place = torch.empty(blocks.shape, dtype=blocks.dtype)
            await moves.gather([blocks], [place], None)
        assert worker.statistics().staged_saves == 0
        gate.open()
        await computing
        await all_quiet((pair[0], pair[0]))


async def test_aborted_requests_give_all_blocks_back(gpu: FakeDevice) -> None:
    async with pair_of((gpu, gpu)) as pair:
        for number in range(24):
            task = asyncio.create_task(
                hand_over(pair, prompt(seed=number), f"{number}")
            )
            for _ in range(3 * number):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        for engine in pair:
            await engine.quiet()
            assert engine.blocks_in_use == 0
        assert await hand_over(pair, prompt()) == 70


class Lost(BlockMoves):
    """Of a GPU no stream of which can be marked any more."""

    def now(self) -> Event | None:
        raise GPUFailed("an illegal access")


async def test_saves_of_a_step_that_cannot_be_marked_fail() -> None:
    async with open_p2p("mem", "push") as ground:
        (worker,), name = ground.prefill.workers, ground.new_name()
        moves, order = worker._registered(), ground.save_order(name)
        worker.bind_connector_metadata(P2PMetadata(saves=(order,)))
        worker._moves = Lost(moves.caches, moves.pool)
        with pytest.raises(GPUFailed, match="an illegal access"):
            await worker.wait_for_save()
        await until_saved(worker)
        assert worker.get_finished().failed_sending == {order.request_id}
        ground.prefill.clear()


@asynccontextmanager
async def sharing(gpu: FakeDevice) -> AsyncIterator[Pair]:
    url = f"mem://gpu-store{next(NAMES)}"
    config = KVTransferConfig(
        kv_connector="StoreConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"store": url, "fingerprint": "toy"},
    )
    shape = toy_shape(MODEL)
    async with (
        StoreBuffer("16MiB", fingerprint="toy") as store,
        serve(url, store=store),
        make_engine("one", config, shape, MODEL, chunk=32, gpu=gpu) as one,
        make_engine("two", config, shape, MODEL, gpu=gpu) as two,
    ):
        yield one, two


async def test_blocks_go_through_a_store(gpu: FakeDevice) -> None:
    async with sharing(gpu) as (one, two):
        tokens = prompt()
        await one.generate(tokens, 2, request_id="a")
        (worker,) = one.workers
        assert isinstance(worker, StoreWorker)
        await worker.flush()
        again = await two.generate(tokens, 2, request_id="b")
        assert again.tokens == MODEL.generate(tokens, 2)
        assert again.external_tokens == 64
        await two.quiet()


def worker_for(device: str, **extra: object) -> StoreWorker:
    config = KVTransferConfig(
        kv_connector="StoreConnector",
        kv_role="kv_both",
        kv_buffer_device=device,
        kv_connector_extra_config={"store": "mem://s", "fingerprint": "toy", **extra},
    )
    return StoreWorker(config, KVEngine(engine_id="E", block_size=4))


@pytest.mark.parametrize(
    ("device", "extra"), [("cuda", {"local_rank": 1}), ("cuda:1", {})]
)
def test_caches_must_be_on_the_device_of_the_configuration(
    device: str, extra: dict[str, object]
) -> None:
    caches = {"a": torch.zeros(4, 8)}
    with pytest.raises(ConfigError, match="cuda:1, and the caches are on cpu"):
        worker_for(device, **extra).register_kv_caches(caches)
    worker_for("cpu").register_kv_caches(caches)


def test_a_gpu_is_the_one_of_the_environments_local_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    config = worker_for("cuda").config
    config.check_device("cuda:1")
    with pytest.raises(ConfigError, match="cuda:1, and the caches are on cuda:0"):
        config.check_device("cuda:0")
    worker_for("cuda", local_rank=0).config.check_device("cuda:0")
    monkeypatch.setenv("LOCAL_RANK", "x")
    with pytest.raises(ConfigError, match="LOCAL_RANK is 'x'"):
        config.check_device("cuda:1")


def test_a_gpu_is_the_one_of_the_local_rank() -> None:
    config = worker_for("cuda", local_rank=1).config
    config.check_device("cuda:1")
    with pytest.raises(ConfigError, match="cuda:1, and the caches are on cuda:0"):
        config.check_device("cuda:0")
    worker_for("cuda").config.check_device("cuda:3")


@pytest.mark.parametrize("name", ["tpu", "cuda:", "cuda:x", "CPU"])
def test_a_device_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is unknown"):
        worker_for(name).config.check_device()
