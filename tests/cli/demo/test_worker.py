from __future__ import annotations

import asyncio
import mmap
import subprocess
import time
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from asynckv.cli.demo.messages import (
    Failed,
    FillBuffer,
    ReadBack,
    Text,
    WaitReturned,
    decode_note,
    encode_line,
)
from asynckv.cli.demo.worker import (
    MAX_NEW_TOKENS,
    Engine,
    LoopLag,
    TokenClock,
    counting_positions,
    resident_bytes,
    ticking,
    timing_layers,
)
from harness.forks import ForkServer

WORKER = """
import asyncio, threading
from asynckv.cli.demo.messages import *
from asynckv.cli.demo.worker import Stage

async def do(order):
    if isinstance(order, ReadBack):
        print("a print")
        return Text("done")
    if isinstance(order, WaitReturned):
        threading.Thread(target=threading.Event().wait, daemon=False).start()
        await asyncio.Event().wait()
    raise ValueError("unknown")

stage = Stage()
asyncio.run(stage.perform(do))
"""


async def talk(forks: ForkServer, *lines: bytes) -> tuple[int, bytes, bytes]:
    """Give a worker these lines, hang up, and wait until it has ended.

    Return its status, with its output and its errors.
    """
    async with (
        asyncio.timeout(30),
        forks.running(WORKER, stderr=subprocess.PIPE) as worker,
    ):
        assert worker.stderr is not None
        worker.stdin.writelines(lines)
        worker.stdin.write_eof()
        output, errors = await worker.stdout.read(), await worker.stderr.read()
        return await worker.wait(), output, errors


@pytest.mark.multiprocess
async def test_a_worker_ends_when_its_parent_hangs_up(forks: ForkServer) -> None:
    status, output, _ = await talk(forks)
    assert (status, output) == (0, b"")


@pytest.mark.multiprocess
async def test_prints_go_to_the_standard_error(forks: ForkServer) -> None:
    _, output, errors = await talk(forks, encode_line(ReadBack(())))
    assert b"a print" in errors
    assert decode_note(output) == Text("done")


@pytest.mark.multiprocess
async def test_an_order_that_fails_is_answered_with_its_error(
    forks: ForkServer,
) -> None:
    _, output, _ = await talk(forks, encode_line(FillBuffer(())))
    assert decode_note(output) == Failed("ValueError: unknown")


@pytest.mark.multiprocess
async def test_what_is_under_way_is_cut_off(forks: ForkServer) -> None:
    status, output, _ = await talk(forks, encode_line(WaitReturned()))
    assert (status, output) == (0, b"")


@pytest.mark.multiprocess
async def test_a_line_that_is_no_order_ends_the_worker(forks: ForkServer) -> None:
    status, _, _ = await talk(forks, b"nonsense\n")
    assert status != 0


PROMPT = tuple(range(20))


def test_the_decoder_layers_are_found(engine: Engine) -> None:
    assert len(engine.layers) == 4


def test_a_prefill_fills_the_cache(engine: Engine) -> None:
    cache = DynamicCache(config=engine.model.config)
    engine.prefill(cache)
    assert cache.get_seq_length() == len(PROMPT)


def test_generating_from_the_prompt_computes_all_of_it(engine: Engine) -> None:
    with engine.recording() as recording:
        sequences = engine.generate(recording.clock)
    done = engine.continuation(recording, sequences)
    assert done.prompt_positions == len(PROMPT)
    assert len(done.tokens) == len(done.token_times_s) == MAX_NEW_TOKENS


async def test_computing_leaves_the_loop_free(engine: Engine) -> None:
    sequences = await engine.compute(lambda: engine.generate(TokenClock()))
    assert sequences.shape[1] == len(PROMPT) + MAX_NEW_TOKENS


def tiny_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = LlamaForCausalLM(config)
    model.train(False)
    return model


async def test_a_loop_that_is_held_up_is_noticed() -> None:
    lag, turned = LoopLag(every_s=0.001), asyncio.Event()
    async with lag.watch():
        asyncio.get_running_loop().call_later(0.005, hold_up, 0.05)
        asyncio.get_running_loop().call_later(0.02, turned.set)
        await turned.wait()
        await asyncio.sleep(0)
    assert lag.worst_s >= 0.03


def hold_up(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


async def test_ticking_ends_with_its_block() -> None:
    ticks: list[None] = []
    ticked = asyncio.Event()

    def tick() -> None:
        ticks.append(None)
        ticked.set()

    async with ticking(10.0, tick):
        await ticked.wait()
    assert len(ticks) == 1


def test_memory_that_is_used_is_counted() -> None:
    before = resident_bytes()
    with mmap.mmap(-1, 64 << 20) as held:  # new pages, whatever malloc has kept
        held[:] = bytes(64 << 20)
        assert resident_bytes() - before > 48 << 20


def test_every_computed_position_is_counted() -> None:
    model = tiny_model()
    with counting_positions(model) as forwards, torch.inference_mode():
        model(torch.tensor([[1, 2, 3]]))
        model(torch.tensor([[4]]))
    assert forwards == [3, 1]


def test_nothing_is_counted_after_the_block() -> None:
    model = tiny_model()
    with counting_positions(model) as forwards:
        pass
    with torch.inference_mode():
        model(torch.tensor([[1, 2, 3]]))
    assert forwards == []


def test_each_layer_has_a_span_and_they_follow_each_other() -> None:
    model = tiny_model()
    computed = list[int]()
    timing = timing_layers(model.model.layers, computed.append)
    with timing as spans, torch.inference_mode():
        model(torch.tensor([[1, 2, 3]]))
    assert computed == [0, 1, 2]
    times = [moment for span in spans for moment in span]
    assert times == sorted(times)


def test_a_token_clock_does_not_count_the_prompt() -> None:
    model: Any = tiny_model()
    clock, ids = TokenClock(), torch.tensor([[1, 2, 3]])
    model.generate(ids, max_new_tokens=4, min_new_tokens=4, streamer=clock)
    assert len(clock.times) == 4
