"""Toy engines on fake GPUs: what is in a GPU's memory, and every byte that moves."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import random
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serve import serve
from asynckv.buffers.store import StoreBuffer
from asynckv.config import KVRole, KVTransferConfig
from asynckv.connectors.caches import BlockMoves
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.p2p.worker import P2PWorker
from asynckv.connectors.requests import LoadRequest, P2PMetadata
from asynckv.connectors.store.worker import StoreWorker
from asynckv.devices.cuda import Event
from asynckv.devices.names import Device
from asynckv.errors import ConfigError, GPUFailed, GPUUnavailable
from asynckv.testing.blocked import until, until_blocked
from harness.cancellations.connectors.grounds import (
    LARGE,
    P2PGround,
    open_p2p,
    until_loaded,
    until_saved,
)
from harness.engines.toy_engine import ToyEngine
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import (
    free_urls,
    make_engine,
    pair_configs,
    toy_shape,
)
from harness.fake_devices import FakeDevice, fake_device_of, lanes_of
from harness.fake_gpus import FakeGpus
from harness.fake_gpus.gates import Gate
from harness.fake_gpus.tensors import FakeTensors
from harness.gpu_processes import why_not
from harness.gpu_workers import save_request, worker_on

SMALL = ToyModel()
MODEL = ToyModel(layers=2, head_dim=128)
"""A layer of 70 tokens is larger than what stays in host memory."""
WIDE = ToyModel(layers=2, head_dim=256)
"""A block is larger than what rides with a frame."""
NAMES = itertools.count()
PREFILL = {"do_remote_decode": True}
DIRECTIONS = pytest.mark.parametrize("direction", ["pull", "push"])
THERE: dict[str, Any] = {"on_gpus": True, "are_buffers_there": True}

Places = tuple[FakeDevice | None, FakeDevice | None]
Engines = tuple[ToyEngine, ToyEngine]


async def until_threads_have_ended() -> None:
    await until(lambda: not any("asynckv-" in t.name for t in threading.enumerate()))


@asynccontextmanager
async def slow_gpus(count: int = 1) -> AsyncIterator[FakeGpus]:
    gpus = FakeGpus(count, seed=3, max_delay=2)
    yield gpus
    await until_threads_have_ended()
    assert not gpus.faults
    gpus.close()


@pytest.fixture
async def gpus() -> AsyncIterator[FakeGpus]:
    async with slow_gpus() as gpus:
        yield gpus


@pytest.fixture
def gpu(gpus: FakeGpus) -> FakeDevice:
    """A GPU of one process, in which both engines are."""
    return fake_device_of(gpus.process())


@dataclasses.dataclass
class Pair:
    """An engine that prefills, and one that decodes."""

    prefill: ToyEngine
    decode: ToyEngine
    model: ToyModel

    @property
    def workers(self) -> tuple[P2PWorker, P2PWorker]:
        """The one of each engine, where they are of one rank."""
        (prefill,), (decode,) = map(workers_of, (self.prefill, self.decode))
        return prefill, decode

    async def prefilled(self, tokens: list[int], name: str) -> dict[str, object]:
        output = await self.prefill.generate(
            tokens, request_id=f"{name}-p", kv_transfer_params=PREFILL
        )
        assert output.kv_transfer_params is not None
        return output.kv_transfer_params

    async def decoded(
        self, tokens: list[int], name: str, params: dict[str, object]
    ) -> int:
        """Return how many tokens were not computed again; the next are right."""
        output = await self.decode.generate(
            tokens, 3, request_id=name, kv_transfer_params=params
        )
        assert output.tokens == self.model.generate(tokens, 3)
        return output.external_tokens

    async def hand_over(self, tokens: list[int], name: str = "r") -> int:
        return await self.decoded(tokens, name, await self.prefilled(tokens, name))

    async def all_quiet(self) -> None:
        for engine in (self.prefill, self.decode):
            await engine.quiet()
            for worker in workers_of(engine):
                await until(functools.partial(is_idle, worker))
                if (buffer := worker.routes.buffer) is not None:
                    await until(functools.partial(is_empty, buffer))
            assert (engine.unknown_completions, engine.blocks_in_use) == (0, 0)


def apart(gpus: FakeGpus, on_gpu: str = "PD") -> Places:
    """Return where engines of two processes are: on the first GPU, and on the last."""
    first, last = (
        fake_device_of(gpus.process(), number) if name in on_gpu else None
        for name, number in (("P", 0), ("D", len(gpus.uuids) - 1))
    )
    return first, last


@asynccontextmanager
async def pair_of(
    places: Places,
    ranks: tuple[int, int] = (1, 1),
    *,
    direction: str = "pull",
    are_buffers_there: bool = True,
    size: str = "16MiB",
) -> AsyncIterator[Pair]:
    """Open engines; without ``are_buffers_there`` what they keep is in host memory."""
    model = MODEL if are_buffers_there else SMALL
    if are_buffers_there:
        urls = free_urls(sum(ranks))
        sides = urls[: ranks[0]], urls[ranks[0] :]
    else:
        sides = mem_urls(ranks[0]), mem_urls(ranks[1])
    configs = pair_configs(*sides, {"direction": direction})
    async with contextlib.AsyncExitStack() as stack:
        engines = []
        for name, config, tp_size, gpu in zip(
            "PD", configs, ranks, places, strict=True
        ):
            is_there = are_buffers_there and gpu is not None
            config = msgspec.structs.replace(
                config,
                kv_buffer_size=size,
                kv_buffer_device="cuda" if is_there else "cpu",
            )
            blocks = 8 if name == "D" and not are_buffers_there else 16
            shape = toy_shape(model, tp_size=tp_size, block_size=blocks)
            engine = make_engine(name, config, shape, model, chunk=32, gpu=gpu)
            engines.append(await stack.enter_async_context(engine))
        yield Pair(engines[0], engines[1], model)


def mem_urls(count: int) -> list[str]:
    """Return the URL of each rank of an engine."""
    name = f"mem://gpu{next(NAMES)}"
    return [name, *(f"{name}.{rank}" for rank in range(1, count))]


def prompt(seed: int = 1) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(50_000) for _ in range(70)]


def workers_of(engine: ToyEngine) -> Iterator[P2PWorker]:
    for worker in engine.workers:
        assert isinstance(worker, P2PWorker)
        yield worker


def is_idle(worker: P2PWorker) -> bool:
    now = worker.statistics()
    return not (now.releasing or now.saving or now.loading or now.staged_bytes)


def is_empty(buffer: LookupBuffer) -> bool:
    return not buffer.statistics().used_bytes


def tensors_of(worker: P2PWorker) -> FakeTensors:
    assert worker._device is not None
    tensors = worker._device.open().tensors
    assert isinstance(tensors, FakeTensors)
    return tensors


def buffer_of(worker: P2PWorker) -> LookupBuffer:
    assert worker.routes.buffer is not None
    return worker.routes.buffer


@DIRECTIONS
@pytest.mark.parametrize("where", ["both", "prefill", "decode"])
async def test_a_prompt_goes_from_engine_to_engine(
    gpu: FakeDevice, direction: str, where: str
) -> None:
    places = gpu if where != "decode" else None, gpu if where != "prefill" else None
    async with pair_of(places, direction=direction, are_buffers_there=False) as pair:
        assert await pair.hand_over(prompt()) == 70
        await pair.all_quiet()
        assert gpu.process.cuda.launches


@DIRECTIONS
@pytest.mark.parametrize("are_buffers_there", [True, False])
@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
async def test_heads_of_several_ranks_come_to_where_they_belong(
    gpus: FakeGpus, ranks: tuple[int, int], direction: str, are_buffers_there: bool
) -> None:
    gpu = fake_device_of(gpus.process())
    places = apart(gpus) if are_buffers_there else (gpu, gpu)
    options: Any = {"direction": direction, "are_buffers_there": are_buffers_there}
    async with pair_of(places, ranks, **options) as pair:
        assert await pair.hand_over(prompt()) > 0
        await pair.all_quiet()


async def test_blocks_are_not_read_before_they_are_computed(gpu: FakeDevice) -> None:
    async with pair_of((gpu, None), direction="push", are_buffers_there=False) as pair:
        gate, (worker, _) = Gate(), pair.workers
        gpu.tensors.stream(0).add(gate)
        computing = asyncio.create_task(pair.prefilled(prompt(), "r"))
        await until(lambda: worker.statistics().saving == 1)
        moves = worker._registered()
        for blocks in moves.caches.blocks(SMALL.layer_names[0], ((0,),)).values():
            place = torch.empty(blocks.shape, dtype=blocks.dtype)
            await moves.gather([blocks], [place], None)
        assert worker.statistics().staged_saves == 0
        gate.open()
        assert await pair.decoded(prompt(), "r", await computing) == 70
        await pair.all_quiet()


async def test_nothing_comes_to_a_buffer_before_it_is_computed(gpus: FakeGpus) -> None:
    async with pair_of(apart(gpus)) as pair:
        worker, _ = pair.workers
        gate = stop_stream(worker)
        computing = asyncio.create_task(pair.prefilled(prompt(), "r"))
        await until(lambda: worker.statistics().saving == 1)
        assert not worker.statistics().saved_bytes
        gate.open()
        assert await pair.decoded(prompt(), "r", await computing) == 70
        await pair.all_quiet()


def stop_stream(worker: P2PWorker) -> Gate:
    """Let the engine's stream stop here."""
    tensors_of(worker).stream(0).add(gate := Gate())
    return gate


@pytest.mark.parametrize(
    ("direction", "are_buffers_there"),
    [("pull", True), ("push", True), ("push", False)],
)
async def test_aborted_requests_give_all_memory_back(
    gpus: FakeGpus, direction: str, are_buffers_there: bool
) -> None:
    gpu = fake_device_of(gpus.process())
    places = apart(gpus) if are_buffers_there else (gpu, gpu)
    options: Any = {"direction": direction, "are_buffers_there": are_buffers_there}
    async with pair_of(places, **options) as pair:
        for number in range(24):
            await abort(pair.hand_over(prompt(number), f"{number}"), 3 * number)
        for number in range(1, 9):
            params = await pair.prefilled(prompt(number), f"late{number}")
            decoding = pair.decoded(prompt(number), f"late{number}", params)
            await abort(decoding, 8 * number)
        assert await pair.hand_over(prompt()) == 70
        await pair.all_quiet()


async def abort(request: Coroutine[Any, Any, object], after: int) -> None:
    """Begin it, and cancel it after so many turns of the loop."""
    task = asyncio.create_task(request)
    for _ in range(after):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize(("count", "transport"), [(1, "cuda_ipc"), (2, "nccl")])
async def test_a_prompt_never_leaves_the_gpus(count: int, transport: str) -> None:
    async with slow_gpus(count) as gpus, pair_of(apart(gpus)) as pair:
        assert await pair.hand_over(prompt()) == 70
        prefill, decode = pair.workers
        assert buffer_of(prefill).device == "cuda:0"
        assert prefill.statistics().staged_saves == 0
        (line,) = decode.routes.peers._lines.values()
        assert (await line.peer()).transport == transport
        await pair.all_quiet()


@pytest.mark.parametrize(
    ("direction", "on_gpu", "where"),
    [
        ("pull", "P", "cuda:0"),
        ("pull", "D", "cpu"),
        ("push", "P", "cpu"),
        ("push", "D", "cuda:0"),
    ],
)
async def test_an_engine_without_a_gpu_is_no_worse_off(
    gpus: FakeGpus, direction: str, on_gpu: str, where: str
) -> None:
    async with pair_of(apart(gpus, on_gpu), direction=direction) as pair:
        assert buffer_of(pair.workers[direction == "push"]).device == where
        assert await pair.hand_over(prompt()) == 70
        await pair.all_quiet()


async def test_what_is_pushed_waits_on_the_gpu_where_it_is_decoded(
    gpus: FakeGpus,
) -> None:
    async with pair_of(apart(gpus), direction="push") as pair:
        assert await pair.hand_over(prompt()) == 70
        prefill, decode = pair.workers
        assert buffer_of(decode).device == "cuda:0"
        assert prefill.routes.buffer is None
        owned = tensors_of(decode)._process.owned
        has = len(owned)
        assert await pair.hand_over(prompt(2), "again") == 70
        assert len(owned) == has
        await pair.all_quiet()


async def begin_to_push(ground: P2PGround) -> LoadRequest:
    """Push the first layer of two, and wait until it is loaded."""
    (prefill,), (decode,) = ground.prefill.workers, ground.decode.workers
    name, (first, last) = ground.new_name(), ground.model.layer_names
    ground.prefill.caches[0].compute()
    ground.decode.caches[0].spoil()
    layers = ground.decode.caches[0].layers
    spoilt = layers[last].cpu()
    prefill.bind_connector_metadata(P2PMetadata(saves=(ground.save_request(name),)))
    prefill.save_kv_layer(first)
    order = ground.load_request(name, is_async=False)
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
    async with pair_of(apart(gpus), size="1MiB") as pair:
        worker, _ = pair.workers
        first = await pair.prefilled(prompt(), "a")
        second = await pair.prefilled(prompt(2), "b")
        now = worker.statistics()
        assert (now.saving, now.staged_saves) == (1, 1)
        assert buffer_of(worker).statistics().peak_bytes <= 2**20
        assert await pair.decoded(prompt(), "a", first) == 70
        assert await pair.decoded(prompt(2), "b", second) == 70
        await pair.all_quiet()


async def test_a_save_is_given_up_whose_stream_does_not_get_on() -> None:
    options: dict[str, Any] = {"direction": "pull", "save_timeout_s": 0.05}
    worker, _ = worker_on("fake", "kv_producer", "mem://stuck-gpu", **options)
    async with worker:
        await worker.start()
        gate = stop_stream(worker)
        worker.bind_connector_metadata(P2PMetadata(saves=(save_request("t"),)))
        await worker.wait_for_save()
        results = worker.get_finished()
        assert results.failed_sending == {"t"}
        assert "took longer than 0.05 s" in results.reasons["t"]
        gate.open()
    await until_threads_have_ended()


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


class Lost(BlockMoves):
    """Of a GPU no stream of which can be marked any more."""

    def now(self) -> Event | None:
        raise GPUFailed("an illegal access")


async def test_saves_of_a_step_that_cannot_be_marked_fail() -> None:
    async with open_p2p("mem", "push") as ground:
        (worker,), name = ground.prefill.workers, ground.new_name()
        moves, order = worker._registered(), ground.save_request(name)
        worker.bind_connector_metadata(P2PMetadata(saves=(order,)))
        worker._moves = Lost(moves.caches, moves.pool)
        with pytest.raises(GPUFailed, match="an illegal access"):
            await worker.wait_for_save()
        await until_saved(worker)
        assert worker.get_finished().failed_sending == {order.request_id}
        ground.prefill.clear()


@asynccontextmanager
async def sharing(
    places: Places, device: str = "cpu", model: ToyModel = WIDE
) -> AsyncIterator[Engines]:
    (url,) = free_urls(1) if model is WIDE else mem_urls(1)
    config = KVTransferConfig(
        kv_connector="StoreConnector",
        kv_role="kv_both",
        kv_buffer_device=device,
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            "store": url,
            "fingerprint": "toy",
            "chunk_tokens": 32,
        },
    )
    shape = toy_shape(model)
    async with (
        StoreBuffer("16MiB", fingerprint="toy") as store,
        serve(url, store=store),
        make_engine("one", config, shape, model, chunk=32, gpu=places[0]) as saver,
        make_engine("two", config, shape, model, gpu=places[1]) as loader,
    ):
        yield saver, loader


async def share(engines: Engines, seed: int = 1, model: ToyModel = WIDE) -> int:
    """Return how many tokens were not computed again."""
    saver, loader = engines
    await saver.generate(prompt(seed), 2, request_id=f"a{seed}")
    (worker,) = saver.workers
    assert isinstance(worker, StoreWorker)
    await worker.flush()
    assert worker.statistics().unsaved_blocks == 0
    output = await loader.generate(prompt(seed), 2, request_id=f"b{seed}")
    assert output.tokens == model.generate(prompt(seed), 2)
    await loader.quiet()
    return output.external_tokens


@pytest.mark.parametrize(
    ("saves", "loads", "device", "model"),
    [
        (True, True, "cpu", WIDE),
        (True, True, "cpu", SMALL),
        (True, True, "cuda", WIDE),
        (True, False, "cpu", WIDE),
        (False, True, "cpu", WIDE),
    ],
)
async def test_blocks_of_a_gpu_go_through_a_store_in_host_memory(
    gpu: FakeDevice, saves: bool, loads: bool, device: str, model: ToyModel
) -> None:
    places = gpu if saves else None, gpu if loads else None
    async with sharing(places, device, model) as engines:
        assert await share(engines, model=model) == 64


async def test_aborted_loads_stop_no_later_one(gpu: FakeDevice) -> None:
    async with sharing((gpu, gpu)) as engines:
        await share(engines)
        for number in range(12):
            loading = engines[1].generate(prompt(), 2, request_id=f"{number}")
            await abort(loading, 4 * number)
        await engines[1].quiet()
        assert await share(engines, 2) == 64


@pytest.mark.parametrize(
    ("role", "direction", "is_awaited"),
    [
        ("kv_both", "push", True),
        ("kv_consumer", "push", False),
        ("kv_producer", "pull", False),
    ],
)
async def test_a_start_gets_a_gpu_ready_that_is_pushed_from_before_all_else(
    monkeypatch: pytest.MonkeyPatch, role: KVRole, direction: str, is_awaited: bool
) -> None:
    async def never(moves: BlockMoves) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(BlockMoves, "open", never)
    worker, _ = worker_on("fake", role, "mem://start", direction=direction)
    async with worker:
        starting = asyncio.create_task(worker.start())
        if is_awaited:
            await until_blocked(starting)
            starting.cancel()
        await asyncio.wait([starting])
        assert starting.cancelled() is is_awaited
        assert (worker.routes.server is None) is is_awaited


@pytest.mark.parametrize(
    ("device", "extra", "found"),
    [
        ("cpu", {}, None),
        ("cuda", {"local_rank": 3}, Device(3)),
        ("cuda:3", {}, Device(3)),
    ],
)
def test_buffers_are_where_they_were_said_to_be(
    device: str, extra: dict[str, object], found: Device | None
) -> None:
    config = KVTransferConfig(
        kv_role="kv_both", kv_buffer_device=device, kv_connector_extra_config=extra
    )
    worker = P2PWorker(config, KVEngine(engine_id="E", block_size=16))
    assert worker._buffer_device() == found


def test_buffers_are_where_the_caches_are(gpu: FakeDevice) -> None:
    config = KVTransferConfig(kv_role="kv_both", kv_buffer_device="cuda")
    engine = KVEngine(engine_id="E", block_size=16)
    worker = P2PWorker(config, engine, lanes=lanes_of(gpu))
    worker.register_kv_caches({"a": gpu.tensor(torch.zeros(4, 16, 2))})
    assert worker._buffer_device() == Device(0)
    worker.abort()
