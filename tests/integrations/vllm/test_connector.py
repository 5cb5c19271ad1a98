"""Equal tokens alone prove nothing, for what is missing is computed: hits count."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.vllm_engines import (
    Engine,
    Pair,
    StartEngine,
    free_url,
    make_tiny_model,
    random_prompt,
    transfer,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

BLOCK = 32


@pytest.mark.parametrize("length", [5, 31, 32, 33, 63, 64, 65, 96, 150, 320, 777])
def test_decoding_goes_on_from_the_kv_of_the_other_engine(
    single: Engine, pair: Pair, length: int
) -> None:
    prompt = random_prompt(length, seed=length)
    before = pair.consumer.external_hits()
    assert pair.ask(prompt).tokens == single.ask(prompt).tokens
    assert pair.consumer.external_hits() - before == length


def test_a_request_that_carries_nothing_is_given_nothing(
    single: Engine, pair: Pair
) -> None:
    prompt = random_prompt(100, seed=1)
    pair.prefill(prompt)
    before = pair.consumer.external_hits()
    assert pair.consumer.ask(prompt).tokens == single.ask(prompt).tokens
    assert pair.consumer.external_hits() == before


def test_only_blocks_that_are_missing_here_are_fetched(
    single: Engine, pair: Pair
) -> None:
    prompt = random_prompt(10 * BLOCK + 7, seed=2)
    first, before = prompt[: 4 * BLOCK + 3], pair.consumer.external_hits()
    assert pair.ask(first).tokens == single.ask(first).tokens
    assert pair.ask(prompt).tokens == single.ask(prompt).tokens
    hits = pair.consumer.external_hits() - before
    assert hits == len(first) + len(prompt) - 4 * BLOCK


def test_nothing_is_fetched_of_a_prompt_that_is_here(
    single: Engine, pair: Pair
) -> None:
    prompt = random_prompt(3 * BLOCK + 1, seed=3)
    pair.consumer.ask(prompt)
    before = pair.consumer.external_hits()
    assert pair.ask(prompt).tokens == single.ask(prompt).tokens
    assert pair.consumer.external_hits() - before <= 1


@pytest.mark.parametrize("length", [50, 64, 150])
def test_what_two_prompts_have_in_common_is_enough(
    single: Engine, pair: Pair, length: int
) -> None:
    whole = random_prompt(150, seed=8 + length)
    prompt, before = whole[:100], pair.consumer.external_hits()
    carried = pair.prefill(whole[:length])
    answer = pair.consumer.ask(prompt, params=carried)
    assert answer.tokens == single.ask(prompt).tokens
    assert pair.consumer.external_hits() - before == min(length, 100)


def test_kv_of_another_prompt_is_never_used(single: Engine, pair: Pair) -> None:
    """It carries another request's parameters: the load fails, and so does it."""
    carried = pair.prefill(random_prompt(100, seed=4))
    prompt = random_prompt(100, seed=5)
    assert pair.consumer.ask(prompt, params=carried).finish_reason == "error"
    assert pair.ask(prompt).tokens == single.ask(prompt).tokens


def test_all_blocks_come_back(single: Engine, pair: Pair) -> None:
    prompt = random_prompt(200, seed=6)
    pair.ask(prompt)
    for engine in (pair.producer, pair.consumer):
        state = engine.state()
        assert (state["free_blocks"], state["requests"]) == (255, 0)


def test_two_hundred_requests_eight_at_a_time(
    single: Engine,
    pair: Pair,
    dtype: str,
    record_property: Callable[[str, object], None],
) -> None:
    """All blocks are the same byte for byte. So may differ only what is computed after.

    In bfloat16 two tokens may be as likely, and who else is in a batch decides.
    """
    lengths = [1 + seed * 37 % 200 for seed in range(200)]
    prompts = [random_prompt(n, seed=1000 + seed) for seed, n in enumerate(lengths)]
    before = pair.consumer.external_hits()
    pair.producer.tell("watch_blocks")
    pair.consumer.tell("watch_blocks")
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda prompt: pair.ask(prompt).tokens, prompts))
        took = time.monotonic() - began
        right = list(pool.map(lambda prompt: single.ask(prompt).tokens, prompts))
    other = [n for n, a, b in zip(lengths, found, right, strict=True) if a != b]
    assert len(other) <= (0 if dtype == "float32" else 2), other
    hits = pair.consumer.external_hits() - before
    assert hits == sum(lengths)
    blocks = _equal_blocks(pair)
    assert blocks == sum(-(-length // BLOCK) for length in lengths)
    what = f"200 requests, 8 at a time, {dtype}: {hits} external tokens in {took:.1f} s"
    record_property(
        "figure", f"{what}, {blocks} blocks equal, {len(other)} answers differ"
    )


def _equal_blocks(pair: Pair) -> int:
    """Return how many blocks were loaded; each is what it was where it was computed."""
    computed = pair.producer.report("blocks")["computed"]
    loaded = pair.consumer.report("blocks")["loaded"]
    for transfer_id, told in loaded.items():
        assert told["digests"] == computed[transfer_id][told["first_block"] :]
    return sum(len(told["digests"]) for told in loaded.values())


def test_wrong_kv_makes_wrong_tokens(
    start_engine: StartEngine, model: Path, single: Engine, dtype: str
) -> None:
    """Else equal tokens would not show that the KV that came was right, and used."""
    url = free_url()
    prompt = random_prompt(100, seed=7)
    config = transfer("kv_producer", listen=url)
    try:
        make_tiny_model(model, seed=1)
        with start_engine(config, dtype=dtype) as producer:
            producer.wait_ready()
            make_tiny_model(model)
            config = transfer("kv_consumer", peers=[url])
            with start_engine(config, dtype=dtype) as consumer:
                wrong = Pair(producer, consumer.wait_ready())
                assert wrong.ask(prompt).tokens != single.ask(prompt).tokens
                assert consumer.external_hits() == len(prompt)
    finally:
        make_tiny_model(model)
