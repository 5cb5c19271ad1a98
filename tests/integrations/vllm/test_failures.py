"""Peers that die, are silent or come back, and requests that are given up."""

from __future__ import annotations

import concurrent.futures
import contextlib
import random
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

import pytest

from harness.vllm_engines import (
    PREFILL,
    Answer,
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

ALL_BLOCKS = 255


def test_an_aborted_load_gives_its_blocks_back(
    start_engine: StartEngine, alone: Engine
) -> None:
    prompt, other = random_prompt(200, seed=1), random_prompt(200, seed=2)
    with started_pair(start_engine, "fail") as pair:
        params = pair.prefill(prompt)
        pair.producer.pause()  # so the load lasts
        request = pair.consumer.add(prompt, params=params)
        _wait_for_used_blocks(pair.consumer, 7)
        pair.consumer.abort(request)
        _wait_for_used_blocks(pair.consumer, 0)
        pair.producer.go_on()
        assert pair.ask(other).tokens == alone.ask(other).tokens
        assert pair.consumer.external_hits() == 200 + len(other)
        _wait_for_used_blocks(pair.consumer, 0)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_producer_killed_during_a_load_is_survived(
    start_engine: StartEngine, alone: Engine, policy: str
) -> None:
    prompt, first = random_prompt(200, seed=3), random_prompt(50, seed=4)
    with started_pair(start_engine, policy) as pair:
        assert pair.ask(first).tokens == alone.ask(first).tokens
        params = pair.prefill(prompt)
        pair.producer.pause()
        request = pair.consumer.add(prompt, params=params)
        _wait_for_used_blocks(pair.consumer, 7)
        began = time.monotonic()
        pair.producer.kill()
        answer = pair.consumer.answer(request)
        assert time.monotonic() - began < 5
        if policy == "fail":
            assert answer.finish_reason == "error"
        else:
            assert answer.tokens == alone.ask(prompt).tokens
        assert pair.consumer.ask(prompt).tokens == alone.ask(prompt).tokens
        assert pair.consumer.external_hits() == 250
        _wait_for_used_blocks(pair.consumer, 0)


def test_a_silent_producer_is_not_waited_for_longer_than_the_deadline(
    start_engine: StartEngine, alone: Engine
) -> None:
    prompt = random_prompt(100, seed=5)
    with started_pair(
        start_engine, "recompute", consume={"load_timeout_s": 1.0}
    ) as pair:
        params = pair.prefill(prompt)
        pair.producer.pause()
        began = time.monotonic()
        answer = pair.consumer.ask(prompt, params=params)
        assert answer.tokens == alone.ask(prompt).tokens
        assert 1 <= time.monotonic() - began < 10
        pair.producer.go_on()


def test_a_transfer_is_loaded_once_and_who_asks_again_computes_at_once(
    start_engine: StartEngine, alone: Engine
) -> None:
    prompt = random_prompt(200, seed=14)
    right = alone.ask(prompt).tokens
    without = {"consumer": {"enable_prefix_caching": False}}
    with started_pair(start_engine, "recompute", options=without) as pair:
        params = pair.prefill(prompt)
        both = [pair.consumer.add(prompt, params=params) for _ in range(2)]
        assert [pair.consumer.answer(one, 5).tokens for one in both] == [right] * 2
        again = pair.consumer.add(prompt, params=params)
        assert pair.consumer.answer(again, 1).tokens == right
        metrics = pair.consumer.state()["metrics"]
        assert metrics["vllm:asynckv_loads"] == 1
        assert metrics["vllm:asynckv_failed_loads"] == 2
        assert "others have taken that entry" in pair.consumer.why_not_loaded()
        _wait_for_used_blocks(pair.consumer, 0)


def test_samples_of_one_prompt_share_its_load_also_where_failures_fail(
    start_engine: StartEngine, alone: Engine
) -> None:
    prompt = random_prompt(200, seed=15)
    right = alone.ask(prompt).tokens
    with started_pair(start_engine, "fail") as pair:
        params = pair.prefill(prompt)
        requests = [pair.consumer.add(prompt, params=params) for _ in range(4)]
        answers = [pair.consumer.answer(one, 5) for one in requests]
        assert [one.tokens for one in answers] == [right] * 4
        assert pair.consumer.state()["metrics"]["vllm:asynckv_loads"] == 1
        again = pair.consumer.add(prompt, params=params)
        assert pair.consumer.answer(again, 1).tokens == right


def test_what_nobody_will_fetch_does_not_stay_where_it_was_computed(
    start_engine: StartEngine, alone: Engine
) -> None:
    prompt = random_prompt(200, seed=16)
    with started_pair(start_engine, "fail") as pair:
        aborted = pair.producer.add(prompt, max_tokens=700, params=PREFILL)
        _wait_for_metric(pair.producer, "asynckv_saves", 1)
        pair.producer.abort(aborted)
        _wait_for_metric(pair.producer, "asynckv_waiting_entries", 0)
        answer = pair.producer.ask(prompt, max_tokens=1, params=PREFILL, samples=3)
        _wait_for_metric(pair.producer, "asynckv_waiting_entries", 1)
        _wait_for_metric(pair.producer, "asynckv_saves", 2)
        decoded = pair.consumer.ask(prompt, params=answer.kv_transfer_params)
        assert decoded.tokens == alone.ask(prompt).tokens
        assert pair.consumer.external_hits() == len(prompt)
        _wait_for_metric(pair.producer, "asynckv_waiting_entries", 0)


def test_either_engine_may_come_back_with_an_empty_memory(
    start_engine: StartEngine, alone: Engine
) -> None:
    url = free_url()
    produce = transfer("kv_producer", listen=url)
    consume = transfer("kv_consumer", peers=[url])
    prompts = [random_prompt(100, seed=seed) for seed in (6, 7, 8)]
    with ExitStack() as stack:
        producer = stack.enter_context(start_engine(produce)).wait_ready()
        consumer = stack.enter_context(start_engine(consume)).wait_ready()
        for number, prompt in enumerate(prompts):
            answer = Pair(producer, consumer).ask(prompt)
            assert answer.tokens == alone.ask(prompt).tokens
            assert consumer.external_hits() == 100 * (2 if number == 2 else 1)
            if number == 0:
                consumer.kill()
                consumer = stack.enter_context(start_engine(consume)).wait_ready()
            elif number == 1:
                producer.kill()
                producer = stack.enter_context(start_engine(produce)).wait_ready()


def test_an_engine_of_another_block_size_is_refused_and_told_why(
    start_engine: StartEngine, alone: Engine
) -> None:
    prompt = random_prompt(100, seed=10)
    url = free_url()
    produce = transfer("kv_producer", listen=url)
    consume = transfer("kv_consumer", "recompute", peers=[url])
    with (
        start_engine(produce) as producer,
        start_engine(consume, block_size=64) as consumer,
    ):
        pair = Pair(producer.wait_ready(), consumer.wait_ready())
        assert pair.ask(prompt).tokens == alone.ask(prompt).tokens
        state = consumer.state()
        assert state["metrics"]["vllm:asynckv_failed_loads"] == 1
        assert "layout" in consumer.why_not_loaded()


def test_completions_that_are_late_twice_or_of_nobody_harm_no_engine(
    start_engine: StartEngine, alone: Engine
) -> None:
    prompts = [random_prompt(100, seed=seed) for seed in (11, 12, 13)]
    with started_pair(start_engine, "fail") as pair:
        engines = (pair.producer, pair.consumer)
        told = (PREFILL, pair.prefill(prompts[0]))
        running = [
            engine.add(prompts[0], max_tokens=300, params=params)
            for engine, params in zip(engines, told, strict=True)
        ]
        for prompt in prompts:
            assert pair.ask(prompt).tokens == alone.ask(prompt).tokens
            for engine in engines:
                engine.tell("lie")
                engine.tell("lie")
        right = alone.ask(prompts[0], max_tokens=300).tokens
        for engine, request in zip(engines, running, strict=True):
            assert engine.answer(request).tokens == right
            _wait_for_used_blocks(engine, 0)
        assert pair.ask(prompts[0]).tokens == right[:8]


def test_a_hundred_aborts_at_random_moments_lose_no_block_and_no_token(
    start_engine: StartEngine, alone: Engine
) -> None:
    chance = random.Random(9)
    prompts = [random_prompt(1 + seed * 13 % 150, seed=seed) for seed in range(200)]
    pauses = [chance.uniform(0, 0.06) if seed % 2 else None for seed in range(200)]
    with started_pair(start_engine, "fail") as pair:

        def ask(prompt: list[int], pause_s: float | None) -> Answer:
            if pause_s is None:
                return pair.ask(prompt)
            return _abort_after(pair, prompt, pause_s)

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, prompts, pauses))
        for prompt, pause_s, answer in zip(prompts, pauses, answers, strict=True):
            if pause_s is None:
                assert answer.tokens == alone.ask(prompt).tokens
        aborted = [one for one in answers if one.finish_reason == "abort"]
        assert len(aborted) > 50
        assert pair.consumer.external_hits() > 0
        for engine in (pair.producer, pair.consumer):
            _wait_for_used_blocks(engine, 0)


def _abort_after(pair: Pair, prompt: list[int], pause_s: float) -> Answer:
    """Abort it in one of the two engines, at whatever it is by then."""
    began = time.monotonic()
    engine = pair.producer
    request = engine.add(prompt, max_tokens=1, params=PREFILL)
    if pause_s > 0.01:
        params = engine.answer(request).kv_transfer_params
        engine = pair.consumer
        request = engine.add(prompt, params=params)
    threading.Event().wait(pause_s - (time.monotonic() - began))
    return engine.abort(request)


def _wait_for_used_blocks(engine: Engine, count: int) -> None:
    deadline = time.monotonic() + 10
    while (used := ALL_BLOCKS - int(engine.state()["free_blocks"])) != count:
        assert time.monotonic() < deadline, f"{used} blocks are used, not {count}"


def _wait_for_metric(engine: Engine, name: str, value: int) -> None:
    deadline = time.monotonic() + 10
    while (found := engine.state()["metrics"].get(f"vllm:{name}", 0)) != value:
        assert time.monotonic() < deadline, f"{name} is {found}, not {value}"
        engine.ask([1, 2, 3], max_tokens=2)  # metrics are told by steps


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
