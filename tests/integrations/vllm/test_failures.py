"""Peers that die, are silent or come back, and requests that are given up."""

from __future__ import annotations

import concurrent.futures
import random
import threading
import time
from contextlib import ExitStack

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
