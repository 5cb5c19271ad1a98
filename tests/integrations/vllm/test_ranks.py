"""Engines of two ranks: workers are processes of their own, and vLLM pickles."""

from __future__ import annotations

import pytest

from harness.vllm_engines import (
    Pair,
    StartEngine,
    free_url,
    random_prompt,
    transfer,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


def test_each_rank_is_sent_to_its_own_and_other_numbers_are_refused(
    start_engine: StartEngine,
) -> None:
    url = free_url()
    prompts = [random_prompt(length, seed=length) for length in (5, 96, 150)]
    produce = transfer("kv_producer", listen=url)
    consume = transfer("kv_consumer", "recompute", peers=[url])
    with (
        start_engine(produce, tensor_parallel_size=2) as producer,
        start_engine(consume, tensor_parallel_size=2) as consumer,
        start_engine(consume) as single,
    ):
        pair = Pair(producer.wait_ready(), consumer.wait_ready())
        single.wait_ready()
        for prompt in prompts:
            assert pair.ask(prompt).tokens == single.ask(prompt).tokens
        assert consumer.external_hits() == sum(map(len, prompts))
        metrics = consumer.state()["metrics"]
        assert metrics["vllm:asynckv_loads"] == len(prompts)
        prompt = random_prompt(80, seed=80)
        refused = single.ask(prompt, params=pair.prefill(prompt))
        assert refused.tokens == pair.consumer.ask(prompt).tokens
        assert single.state()["metrics"]["vllm:asynckv_failed_loads"] == 1
        why = single.why_not_loaded()
        assert "ranks: 1" in why
        assert "ranks: 2" in why
