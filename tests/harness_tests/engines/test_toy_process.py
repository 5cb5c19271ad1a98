"""Two engines in two processes, over real sockets: the caches are byte-identical."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import AsyncIterator

import msgspec
import pytest

from asynckv.config import KVTransferConfig
from asynckv.parallel.shapes import EngineShape, KVLayout
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import free_urls, pair_configs, toy_shape
from harness.engines.toy_process import ToyAnswer, ToyAsked, ToySettings

MODEL = ToyModel()


class Engine:
    """One such process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, asked: ToyAsked) -> ToyAnswer:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(asked) + b"\n")
        line = await self._process.stdout.readline()
        return msgspec.json.decode(line, type=ToyAnswer)


@contextlib.asynccontextmanager
async def started(
    name: str, config: KVTransferConfig, shape: EngineShape
) -> AsyncIterator[Engine]:
    settings = msgspec.json.encode(ToySettings(name, config, shape)).decode()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "harness.engines.toy_process",
        settings,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**24,
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        yield Engine(process)
        process.stdin.close()
        await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("sizes", "direction", "layout"),
    [
        ((2, 1), "pull", KVLayout.kv_first()),
        pytest.param(
            *((1, 2), "pull", KVLayout.blocks_first("HND")), marks=pytest.mark.chaos
        ),
        pytest.param((2, 1), "push", KVLayout.fused(), marks=pytest.mark.chaos),
        pytest.param((1, 2), "push", KVLayout.kv_first(), marks=pytest.mark.chaos),
    ],
)
async def test_the_caches_of_two_processes_are_byte_identical(
    sizes: tuple[int, int], direction: str, layout: KVLayout
) -> None:
    p_size, d_size = sizes
    urls = free_urls(3)
    configs = pair_configs(urls[:p_size], urls[p_size:], {"direction": direction})
    chance = random.Random(3)
    tokens = [chance.randrange(50_000) for _ in range(150)]
    p_shape = toy_shape(MODEL, tp_size=p_size)
    d_shape = toy_shape(MODEL, tp_size=d_size, layout=layout)
    async with (
        started("P", configs[0], p_shape) as prefill,
        started("D", configs[1], d_shape) as decode,
    ):
        first = await prefill.ask(ToyAsked("p", tokens, 1, {"do_remote_decode": True}))
        last = await decode.ask(ToyAsked("d", tokens, 4, first.kv_transfer_params))
    assert last.external_tokens == 150
    assert last.digests == first.digests and len(last.digests) == 4 * 4
    assert last.tokens == MODEL.generate(tokens, 4)
