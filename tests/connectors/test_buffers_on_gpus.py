"""Toy engines whose connectors keep what they save in the memory of one GPU."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.config import KVTransferConfig
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.p2p.worker import P2PWorker
from asynckv.connectors.requests import LoadOrder, P2PMetadata
from asynckv.errors import ConfigError, GPUUnavailable
from asynckv.testing.blocked import until
from harness.cancellations.connectors.grounds import (
    LARGE,
    P2PGround,
    open_p2p,
    until_loaded,
)
from harness.engines.toy_engine import ToyEngine
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import (
    free_urls,
    make_engine,
    pair_configs,
    toy_shape,
)
from harness.fake_devices import fake_device_of
from harness.fake_gpus import FakeGpus
from harness.fake_gpus.gates import Gate
from harness.fake_gpus.tensors import FakeTensors
from harness.gpu_processes import why_not
from harness.gpu_workers import save_order, worker_on

MODEL = ToyModel(layers=2, head_dim=128)
"""A layer of 70 tokens is larger than what stays in host memory."""
PREFILL = {"do_remote_decode": True}
THERE: dict[str, Any] = {"on_gpus": True, "are_buffers_there": True}

Pair = tuple[ToyEngine, ToyEngine]


@pytest.fixture
async def gpus() -> AsyncIterator[FakeGpus]:
    gpus = FakeGpus(seed=3, max_delay=2)
    yield gpus
    await until(lambda: not any("asynckv-" in t.name for t in threading.enumerate()))
    assert not gpus.faults
    gpus.close()


@asynccontextmanager
async def pair_of(
    gpus: FakeGpus,
    ranks: tuple[int, int] = (1, 1),
    *,
    on_gpu: str = "PD",
    size: str = "16MiB",
    direction: str = "pull",
) -> AsyncIterator[Pair]:
    urls = free_urls(sum(ranks))
    configs = pair_configs(urls[: ranks[0]], urls[ranks[0] :], {"direction": direction})
    async with contextlib.AsyncExitStack() as stack:
        engines, at = [], {"P": 0, "D": len(gpus.uuids) - 1}
        for name, config, tp_size in zip("PD", configs, ranks, strict=True):
            is_there = name in on_gpu
            config = msgspec.structs.replace(
                config,
                kv_buffer_size=size,
                kv_buffer_device="cuda" if is_there else "cpu",
            )
            engine = make_engine(
                *(name, config, toy_shape(MODEL, tp_size=tp_size), MODEL),
                chunk=32,
                gpu=fake_device_of(gpus.process(), at[name]) if is_there else None,
            )
            engines.append(await stack.enter_async_context(engine))
        yield engines[0], engines[1]


def prompt(length: int = 70, seed: int = 1) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(50_000) for _ in range(length)]


async def prefilled(pair: Pair, tokens: list[int], name: str) -> dict[str, object]:
    output = await pair[0].generate(
        tokens, request_id=f"{name}-p", kv_transfer_params=PREFILL
    )
    assert output.kv_transfer_params is not None
    return output.kv_transfer_params


async def decoded(
    pair: Pair, tokens: list[int], name: str, params: dict[str, object]
) -> int:
    """Return how many tokens were not computed again."""
    output = await pair[1].generate(
        tokens, 3, request_id=name, kv_transfer_params=params
    )
    assert output.tokens == MODEL.generate(tokens, 3)
    return output.external_tokens


async def hand_over(pair: Pair, tokens: list[int], name: str = "r") -> int:
    params = await prefilled(pair, tokens, name)
    return await decoded(pair, tokens, name, params)


def workers_of(engine: ToyEngine) -> Iterator[P2PWorker]:
    for worker in engine.workers:
        assert isinstance(worker, P2PWorker)
        yield worker


def is_idle(worker: P2PWorker) -> bool:
    now = worker.statistics()
    return not (now.releasing or now.saving or now.loading or now.staged_bytes)


def allocated_on(worker: P2PWorker) -> int:
    """Return how many allocations there are on a worker's GPU."""
    assert worker._device is not None
    tensors = worker._device.open().tensors
    assert isinstance(tensors, FakeTensors)
    return len(tensors._process.owned)


def is_empty(buffer: LookupBuffer) -> bool:
    return not buffer.statistics().used_bytes


async def all_quiet(pair: Pair) -> None:
    for engine in pair:
        await engine.quiet()
        for worker in workers_of(engine):
            await until(functools.partial(is_idle, worker))
            if (buffer := worker.routes.buffer) is not None:
                await until(functools.partial(is_empty, buffer))
        assert engine.blocks_in_use == 0


async def test_a_prompt_never_leaves_the_gpu(gpus: FakeGpus) -> None:
    async with pair_of(gpus) as pair:
        assert await hand_over(pair, prompt()) == 70
        (prefill,), (decode,) = map(workers_of, pair)
        assert prefill.routes.buffer is not None
        assert prefill.routes.buffer.device == "cuda:0"
        assert prefill.statistics().staged_saves == 0
        (line,) = decode.routes.peers._lines.values()
        assert (await line.peer()).transport == "cuda_ipc"
        await all_quiet(pair)


async def test_a_prompt_goes_from_one_gpu_to_another() -> None:
    two = FakeGpus(2, seed=3, max_delay=2)
    async with pair_of(two) as pair:
        assert await hand_over(pair, prompt()) == 70
        (decode,) = workers_of(pair[1])
        (line,) = decode.routes.peers._lines.values()
        assert (await line.peer()).transport == "nccl"
        await all_quiet(pair)
    await until(lambda: not any("asynckv-" in t.name for t in threading.enumerate()))
    assert not two.faults
    two.close()


@pytest.mark.parametrize("direction", ["pull", "push"])
@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
async def test_heads_of_several_ranks_come_to_where_they_belong(
    gpus: FakeGpus, ranks: tuple[int, int], direction: str
) -> None:
    async with pair_of(gpus, ranks, direction=direction) as pair:
        assert await hand_over(pair, prompt()) > 0
        await all_quiet(pair)


@pytest.mark.parametrize(("on_gpu", "where"), [("P", "cuda:0"), ("D", "cpu")])
async def test_an_engine_without_a_gpu_is_no_worse_off(
    gpus: FakeGpus, on_gpu: str, where: str
) -> None:
    async with pair_of(gpus, on_gpu=on_gpu) as pair:
        (prefill,) = workers_of(pair[0])
        assert prefill.routes.buffer is not None
        assert prefill.routes.buffer.device == where
        assert await hand_over(pair, prompt()) == 70
        await all_quiet(pair)


async def test_what_is_pushed_waits_on_the_gpu_where_it_is_decoded(
    gpus: FakeGpus,
) -> None:
    async with pair_of(gpus, direction="push") as pair:
        assert await hand_over(pair, prompt()) == 70
        (prefill,), (decode,) = map(workers_of, pair)
        assert decode.routes.buffer is not None
        assert decode.routes.buffer.device == "cuda:0"
        assert prefill.routes.buffer is None
        has = allocated_on(decode)
        assert await hand_over(pair, prompt(seed=2), "again") == 70
        assert allocated_on(decode) == has
        await all_quiet(pair)


@pytest.mark.parametrize(("on_gpu", "where"), [("P", "cpu"), ("D", "cuda:0")])
async def test_who_pushes_need_not_know_where_that_waits(
    gpus: FakeGpus, on_gpu: str, where: str
) -> None:
    async with pair_of(gpus, on_gpu=on_gpu, direction="push") as pair:
        assert await hand_over(pair, prompt()) == 70
        (decode,) = workers_of(pair[1])
        assert decode.routes.buffer is not None
        assert decode.routes.buffer.device == where
        await all_quiet(pair)


async def begin_to_push(ground: P2PGround) -> LoadOrder:
    """Push the first layer of two, and wait until it is loaded."""
    (prefill,), (decode,) = ground.prefill.workers, ground.decode.workers
    name, (first, last) = ground.new_name(), ground.model.layer_names
    ground.prefill.caches[0].compute()
    ground.decode.caches[0].spoil()
    layers = ground.decode.caches[0].layers
    spoilt = layers[last].cpu()
    prefill.bind_connector_metadata(P2PMetadata(saves=(ground.save_order(name),)))
    prefill.save_kv_layer(first)
    order = ground.load_order(name, is_async=False)
    await ground.begin_load(order)
    await decode.wait_for_layer_load(first)
    assert not torch.equal(layers[first].cpu(), spoilt)
    assert torch.equal(layers[last].cpu(), spoilt)
    return order


async def test_a_pushed_layer_is_loaded_before_the_next_is_computed() -> None:
    async with open_p2p("unix", "push", model=LARGE, **THERE) as ground:
        order = await begin_to_push(ground)
        ground.prefill.workers[0].save_kv_layer(ground.model.layer_names[1])
        await ground.end_save(order.transfer_id)
        await ground.end_load(order)
        await ground.check_quiet()


async def test_what_was_pushed_by_a_peer_that_dies_keeps_no_memory() -> None:
    async with open_p2p("unix", "push", model=LARGE, **THERE) as ground:
        order = await begin_to_push(ground)
        (decode,) = ground.decode.workers
        ground.prefill.workers[0].abort()
        await until_loaded(decode)
        assert decode.get_finished().failed_recving == {order.request_id}
        buffer = decode.routes.buffer
        assert buffer is not None and buffer.is_on_gpu
        await until(lambda: not buffer.statistics().used_bytes)
        await until(lambda: not buffer.statistics().pinned_bytes)


async def test_what_has_no_room_on_the_gpu_goes_on_from_host_memory(
    gpus: FakeGpus,
) -> None:
    async with pair_of(gpus, size="1MiB") as pair:
        (worker,), tokens = workers_of(pair[0]), prompt(seed=2)
        first = await prefilled(pair, prompt(), "a")
        second = await prefilled(pair, tokens, "b")
        now = worker.statistics()
        assert (now.saving, now.staged_saves) == (1, 1)
        assert worker.routes.buffer is not None
        assert worker.routes.buffer.statistics().peak_bytes <= 2**20
        assert await decoded(pair, prompt(), "a", first) == 70
        assert await decoded(pair, tokens, "b", second) == 70
        await all_quiet(pair)


async def test_nothing_is_read_before_it_is_computed(gpus: FakeGpus) -> None:
    async with pair_of(gpus) as pair:
        (worker,), (rank,) = workers_of(pair[0]), pair[0].ranks
        assert rank._gpu is not None
        gate = Gate()
        rank._gpu.tensors.stream(0).add(gate)
        computing = asyncio.create_task(prefilled(pair, prompt(), "r"))
        await until(lambda: worker.statistics().saving == 1)
        assert not worker.statistics().saved_bytes
        gate.open()
        assert await decoded(pair, prompt(), "r", await computing) == 70
        await all_quiet(pair)


@pytest.mark.parametrize("direction", ["pull", "push"])
async def test_aborted_requests_give_all_memory_back(
    gpus: FakeGpus, direction: str
) -> None:
    async with pair_of(gpus, direction=direction) as pair:
        for number in range(1, 9):
            tokens = prompt(seed=number)
            params = await prefilled(pair, tokens, f"{number}")
            task = asyncio.create_task(decoded(pair, tokens, f"{number}", params))
            for _ in range(8 * number):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        assert await hand_over(pair, prompt()) == 70
        await all_quiet(pair)


async def test_a_save_is_given_up_whose_stream_does_not_get_on() -> None:
    options: dict[str, Any] = {"direction": "pull", "save_timeout_s": 0.05}
    worker, _ = worker_on("fake", "kv_producer", "mem://stuck-gpu", **options)
    async with worker:
        await worker.start()
        gate = stop_stream(worker)
        worker.bind_connector_metadata(P2PMetadata(saves=(save_order("t"),)))
        await worker.wait_for_save()
        results = worker.get_finished()
        assert results.failed_sending == {"t"}
        assert "took longer than 0.05 s" in results.reasons["t"]
        gate.open()
    await until(lambda: not any("asynckv-" in t.name for t in threading.enumerate()))


def stop_stream(worker: P2PWorker) -> Gate:
    """Let the engine's stream stop here."""
    assert worker._device is not None
    tensors, gate = worker._device.open().tensors, Gate()
    assert isinstance(tensors, FakeTensors)
    tensors.stream(0).add(gate)
    return gate


@pytest.mark.skipif(why_not("real") == "", reason="there is a GPU here")
async def test_a_gpu_that_is_not_there_is_told_at_the_start() -> None:
    config = KVTransferConfig(
        kv_connector="P2PConnector",
        kv_role="kv_producer",
        kv_buffer_device="cuda",
        kv_connector_extra_config={"listen": "mem://no-gpu", "direction": "pull"},
    )
    worker = P2PWorker(config, KVEngine(engine_id="P", block_size=16))
    with pytest.raises(GPUUnavailable):
        await worker.start()
    await worker.aclose()


async def test_caches_on_another_gpu_than_the_buffer_are_refused() -> None:
    two = FakeGpus(2)
    process = two.process()
    config, _ = pair_configs(["mem://of-two"], ["mem://nobody"], {"direction": "pull"})
    config = msgspec.structs.replace(config, kv_buffer_device="cuda")
    device = fake_device_of(process).device
    engine = KVEngine(engine_id="P", block_size=16)
    async with P2PWorker(config, engine, device=device) as worker:
        await worker.start()
        caches = {"a": fake_device_of(process, 1).tensor(torch.zeros(4, 16, 2))}
        with pytest.raises(
            ConfigError, match="on cuda:0, and the caches are on cuda:1"
        ):
            worker.register_kv_caches(caches)
    two.close()
