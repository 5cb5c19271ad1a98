"""Engines with too few blocks for their requests: some wait, some are preempted."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Final

import pytest

from harness.vllm_engines import (
    PREFILL,
    Engine,
    Pair,
    StartEngine,
    free_url,
    random_prompt,
    started_pair,
    transfer,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

FEW = 24
TOO_FEW: Final = {"num_gpu_blocks_override": FEW, "max_model_len": 32 * (FEW - 1)}
FEW_IN_PRODUCER: Final = {"producer": TOO_FEW}
FEW_IN_CONSUMER: Final = {"consumer": TOO_FEW}


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_producer_that_preempts_saves_what_was_asked_for(
    start_engine: StartEngine,
    alone: Engine,
    layerwise: bool,
    record_property: Callable[[str, object], None],
) -> None:
    """It decodes on while it saves, so that others take blocks that are read."""
    prompts = [random_prompt(90 + 7 * seed, seed=seed) for seed in range(24)]
    with started_pair(
        start_engine, produce={"layerwise": layerwise}, options=FEW_IN_PRODUCER
    ) as pair:

        def ask(prompt: list[int]) -> tuple[int, ...]:
            told = pair.producer.ask(prompt, max_tokens=40, params=PREFILL)
            return pair.consumer.ask(prompt, params=told.kv_transfer_params).tokens

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            found = list(pool.map(ask, prompts))
        assert found == [alone.ask(prompt).tokens for prompt in prompts]
        assert pair.consumer.external_hits() == sum(map(len, prompts))
        preempted = _preemptions(pair.producer)
        assert preempted > 0
        _wait_until_free(pair.producer, FEW - 1)
    record_property(
        "figure", f"24 saves, layerwise {layerwise}: {preempted} preemptions"
    )


def test_a_consumer_that_preempts_computes_again_what_was_loaded(
    start_engine: StartEngine,
    alone: Engine,
    record_property: Callable[[str, object], None],
) -> None:
    prompts = [random_prompt(90 + 7 * seed, seed=100 + seed) for seed in range(24)]
    with started_pair(start_engine, options=FEW_IN_CONSUMER) as pair:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(pair.ask, one, max_tokens=60) for one in prompts]
            found = [answer.result().tokens for answer in asked]
        assert found == [alone.ask(one, max_tokens=60).tokens for one in prompts]
        assert pair.consumer.external_hits() > 0
        preempted = _preemptions(pair.consumer)
        assert preempted > 0
        _wait_until_free(pair.consumer, FEW - 1)
    record_property("figure", f"24 loads: {preempted} preemptions")


def test_blocks_of_a_preempted_request_are_not_overwritten_while_they_are_saved(
    start_engine: StartEngine, alone: Engine
) -> None:
    """Its save waits for room, in a copy, until another prompt is fetched."""
    kept, other, prompt = (random_prompt(n, seed=n) for n in (300, 301, 200))
    produce = {"max_bytes": "1MiB", "save_timeout_s": 60.0}
    with started_pair(start_engine, produce=produce, options=FEW_IN_PRODUCER) as pair:
        params = pair.prefill(kept)
        first = pair.producer.add(other, max_tokens=300)
        last = pair.producer.add(prompt, max_tokens=400, params=PREFILL)
        # Nobody has fetched anything: the engine goes on all the same.
        assert pair.producer.answer(first).tokens == _long(alone, other, 300)
        answer = pair.producer.answer(last)
        assert answer.tokens == _long(alone, prompt, 400)
        # It is the one that was being saved who was preempted: only then is one copied.
        assert pair.producer.state()["staged_saves"] == 1
        found = pair.consumer.ask(kept, params=params)
        assert found.tokens == alone.ask(kept).tokens
        found = pair.consumer.ask(prompt, params=answer.kv_transfer_params)
        assert found.tokens == answer.tokens[:8]
        assert pair.consumer.external_hits() == 500


def test_an_aborted_request_that_never_had_blocks_is_not_kept_for(
    start_engine: StartEngine, alone: Engine
) -> None:
    """The producer has place for one prompt: the next one is saved all the same."""
    first, second = random_prompt(500, seed=200), random_prompt(300, seed=201)
    third = random_prompt(300, seed=202)
    produce = {"max_bytes": "1MiB", "save_timeout_s": 60.0}
    with started_pair(start_engine, produce=produce, options=FEW_IN_CONSUMER) as pair:
        running = pair.consumer.add(first, max_tokens=200)
        _wait_until_free(pair.consumer, lambda count: count < 10)
        params = pair.prefill(second)
        waiting = pair.consumer.add(second, params=params)
        assert pair.consumer.state()["requests"] == 2
        pair.consumer.abort(waiting)
        pair.consumer.abort(running)
        assert pair.ask(third).tokens == alone.ask(third).tokens
        assert pair.consumer.external_hits() == len(third)
        _wait_until_free(pair.consumer, FEW - 1)


def test_a_consumer_that_comes_back_finds_what_was_kept_for_it(
    start_engine: StartEngine, alone: Engine
) -> None:
    """It dies before it has loaded anything, and while it loads."""
    url = free_url()
    produce = transfer("kv_producer", listen=url)
    consume = transfer("kv_consumer", peers=[url])
    first, *prompts = (random_prompt(200, seed=seed) for seed in (300, 301, 302))
    with contextlib.ExitStack() as stack:
        producer = stack.enter_context(start_engine(produce)).wait_ready()
        consumer = stack.enter_context(start_engine(consume)).wait_ready()
        pair = Pair(producer, consumer)
        assert pair.ask(first).tokens == alone.ask(first).tokens
        kept = [pair.prefill(prompt) for prompt in prompts]
        producer.pause()  # what it is asked for waits in its socket
        consumer.add(prompts[0], params=kept[0])
        _wait_until_free(consumer, lambda count: count < 255)
        consumer.kill()
        producer.go_on()
        consumer = stack.enter_context(start_engine(consume)).wait_ready()
        for prompt, params in zip(prompts, kept, strict=True):
            answer = consumer.ask(prompt, params=params)
            assert answer.tokens == alone.ask(prompt).tokens
        assert consumer.external_hits() == 400


def _long(engine: Engine, prompt: list[int], count: int) -> tuple[int, ...]:
    return engine.ask(prompt, max_tokens=count).tokens


def _preemptions(engine: Engine) -> int:
    return int(engine.state()["metrics"]["vllm:num_preemptions"])


def _wait_until_free(engine: Engine, wanted: int | Callable[[int], bool]) -> None:
    deadline = time.monotonic() + 10
    while True:
        count = int(engine.state()["free_blocks"])
        if wanted(count) if callable(wanted) else count == wanted:
            return
        assert time.monotonic() < deadline, f"{count} blocks are free"
        threading.Event().wait(0.01)
