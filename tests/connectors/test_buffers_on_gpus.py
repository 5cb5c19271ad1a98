"""Toy engines whose connectors keep what they save in the memory of one GPU."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from asynckv.connectors.p2p_worker import P2PWorker
from asynckv.testing.blocked import until
from asynckv.testing.engines.toy_engine import ToyEngine
from asynckv.testing.engines.toy_model import ToyModel
from asynckv.testing.engines.toy_pairs import (
    free_urls,
    make_engine,
    pair_configs,
    toy_shape,
)
from asynckv.testing.fake_devices import fake_device_of
from asynckv.testing.fake_gpus import FakeGpus

MODEL = ToyModel(layers=2, head_dim=256)
"""A layer of 70 tokens is larger than what stays in host memory."""
PREFILL = {"do_remote_decode": True}

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
    gpus: FakeGpus, ranks: tuple[int, int] = (1, 1), **extra: object
) -> AsyncIterator[Pair]:
    urls = free_urls(sum(ranks))
    p, d = urls[: ranks[0]], urls[ranks[0] :]
    more = {"direction": "pull", **extra}
    configs = pair_configs(p, d, more, buffer_device="cuda")
    shapes = [toy_shape(MODEL, tp_size=size) for size in ranks]
    ours, theirs = (fake_device_of(gpus.process()) for _ in range(2))
    async with (
        make_engine("P", configs[0], shapes[0], MODEL, chunk=32, gpu=ours) as prefill,
        make_engine("D", configs[1], shapes[1], MODEL, gpu=theirs) as decode,
    ):
        yield prefill, decode


def prompt(length: int = 70, seed: int = 1) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(50_000) for _ in range(length)]


async def hand_over(pair: Pair, tokens: list[int], name: str = "r") -> int:
    """Return how many tokens were not computed again."""
    first = await pair[0].generate(
        tokens, request_id=f"{name}-p", kv_transfer_params=PREFILL
    )
    assert first.kv_transfer_params is not None
    last = await pair[1].generate(
        tokens, 3, request_id=name, kv_transfer_params=first.kv_transfer_params
    )
    assert last.tokens == MODEL.generate(tokens, 3)
    return last.external_tokens


def workers_of(engine: ToyEngine) -> Iterator[P2PWorker]:
    for worker in engine.workers:
        assert isinstance(worker, P2PWorker)
        yield worker


def is_idle(worker: P2PWorker) -> bool:
    now = worker.statistics()
    return not (now.releasing or now.saving or now.loading or now.staged_bytes)


async def all_quiet(pair: Pair) -> None:
    for engine in pair:
        await engine.quiet()
        for worker in workers_of(engine):
            await until(functools.partial(is_idle, worker))
            if (buffer := worker.routes.buffer) is not None:
                await until(lambda buffer=buffer: not buffer.statistics().used_bytes)
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


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
async def test_heads_of_several_ranks_come_to_where_they_belong(
    gpus: FakeGpus, ranks: tuple[int, int]
) -> None:
    async with pair_of(gpus, ranks) as pair:
        assert await hand_over(pair, prompt()) > 0
        await all_quiet(pair)
