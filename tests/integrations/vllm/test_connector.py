"""Equal tokens alone prove nothing, for what is missing is computed: hits count."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asynckv import StoreBuffer, serve
from asynckv.integrations.bridge import Bridge
from harness.vllm_engines import (
    Engine,
    Pair,
    StartEngine,
    free_url,
    make_tiny_model,
    random_prompt,
    transfer,
)
from harness.vllm_engines.commands import OPTIONS, Command, get

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


class Shared:
    """A store that this process serves."""

    def __init__(self, bridge: Bridge[None]) -> None:
        self.url = free_url()
        self.buffer = StoreBuffer("64MiB")
        bridge.enter(lambda: self.buffer, timeout_s=10)
        bridge.enter(lambda: serve(self.url, store=self.buffer), timeout_s=10)
        self._bridge = bridge

    def wait_for(self, keys: int) -> None:
        """Wait until so many blocks are stored."""
        deadline = time.monotonic() + 20
        while self._bridge.run(self._count, timeout_s=5) < keys:
            assert time.monotonic() < deadline, "blocks are not stored"
            threading.Event().wait(0.01)

    async def _count(self) -> int:
        return self.buffer.statistics().keys


@pytest.fixture
def shared() -> Iterator[Shared]:
    bridge = Bridge[None]("store")
    yield Shared(bridge)
    bridge.shutdown()


@pytest.mark.parametrize(("chunk_tokens", "ranks"), [(BLOCK, 1), (64, 2), (None, 1)])
def test_what_one_engine_has_computed_another_need_not(
    start_engine: StartEngine,
    alone: Engine,
    shared: Shared,
    chunk_tokens: int | None,
    ranks: int,
) -> None:
    extra = {"mode": "store", "store": shared.url, "chunk_tokens": chunk_tokens}
    # Once it has not answered in time, on a busy machine, it is not asked for a while.
    config = transfer("kv_both", "fail", lookup_timeout_s=10, **extra)
    chunk, cut = chunk_tokens or 256, {"tensor_parallel_size": ranks}
    prompt, other = random_prompt(600, seed=1), random_prompt(600, seed=2)
    right = alone.ask(prompt).tokens
    with start_engine(config, **cut) as first, start_engine(config, **cut) as second:
        for engine in (first, second):
            engine.wait_ready()
        assert first.ask(prompt).tokens == right
        assert first.external_hits() == 0
        shared.wait_for(600 // chunk * ranks + 1)  # and how they are cut
        assert second.ask(prompt[:300]).tokens == alone.ask(prompt[:300]).tokens
        hits = 300 // chunk * chunk
        assert second.external_hits() == hits
        # It has nine blocks now: of most chunks that ends within one.
        assert second.ask(prompt).tokens == right
        hits += 600 // chunk * chunk - 300 // BLOCK * BLOCK
        assert second.external_hits() == hits
        assert second.ask(other).tokens == alone.ask(other).tokens
        assert second.external_hits() == hits


EXAMPLE = Path(__file__).parents[3] / "examples" / "vllm_prefill_decode"
PREFILL, DECODE, PROXY = (f"http://127.0.0.1:{port}" for port in (8100, 8200, 8000))


@pytest.fixture
def prefill(model: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The first engine, of all that the example starts."""
    commands = {
        PREFILL: [str(EXAMPLE / "prefill.sh"), str(model), *OPTIONS],
        DECODE: [str(EXAMPLE / "decode.sh"), str(model), *OPTIONS],
        PROXY: [sys.executable, str(EXAMPLE / "proxy.py")],
    }
    with contextlib.ExitStack() as stack:
        started = {
            url: stack.enter_context(Command(command, tmp_path / f"{number}.log"))
            for number, (url, command) in enumerate(commands.items())
        }
        for url, command in started.items():
            command.wait_ready(url + ("/openapi.json" if url == PROXY else "/health"))
        yield started[PREFILL].process


@pytest.mark.timeout(400)
def test_requests_go_through_both_engines_and_one_is_enough(
    prefill: subprocess.Popen[bytes],
    start_engine: StartEngine,
    model: Path,
    record_property: Callable[[str, object], None],
) -> None:
    prompts = [random_prompt(length, seed=length) for length in (100, 33, 64, 50)]
    with start_engine() as alone:
        alone.wait_ready()
        right = [list(alone.ask(prompt).tokens) for prompt in prompts]
    began = time.monotonic()
    assert [_complete(model, prompt) for prompt in prompts[:2]] == right[:2]
    assert _stream(model, prompts[2]) == right[2]
    took = time.monotonic() - began
    assert _metric("vllm:external_prefix_cache_hits_total") == 100 + 33 + 64
    assert _metric("vllm:asynckv_loads_total") == 3
    ratio = _samples_cost(model)
    os.killpg(prefill.pid, signal.SIGKILL)
    prefill.wait()
    loaded = _metric("vllm:asynckv_loads_total")
    assert _complete(model, prompts[3]) == right[3]
    assert _metric("vllm:asynckv_loads_total") == loaded
    record_property(
        "figure",
        f"vllm serve: 197 external tokens, 3 requests in {took:.2f} s; "
        f"n=4 takes {ratio:.2f} times as long as n=1",
    )


def _samples_cost(model: Path) -> float:
    """Return how long four samples of a prompt take, by one; each loads once."""
    loaded = _metric("vllm:asynckv_loads_total")
    took: dict[int, list[float]] = {1: [], 4: []}
    for seed in range(6):
        for n in took:
            body = _body(model, random_prompt(300, seed=100 + 10 * seed + n))
            # vLLM refuses several greedy samples.
            body |= {"n": n, "temperature": 1, "top_k": 1}
            began = time.monotonic()
            answer = json.loads(get(f"{PROXY}/v1/completions", body))
            took[n].append(time.monotonic() - began)
            samples = [tuple(one["token_ids"]) for one in answer["choices"]]
            assert len(samples) == n and len(set(samples)) == 1
    assert _metric("vllm:asynckv_loads_total") == loaded + 12
    assert _metric("vllm:asynckv_failed_loads_total") == 0
    ratio = min(took[4]) / min(took[1])
    assert ratio <= 1.5, took
    return ratio


def _complete(model: Path, prompt: list[int]) -> list[int]:
    answer = json.loads(get(f"{PROXY}/v1/completions", _body(model, prompt)))
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def _stream(model: Path, prompt: list[int]) -> list[int]:
    body = _body(model, prompt) | {"stream": True}
    lines = get(f"{PROXY}/v1/completions", body).splitlines()
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events.pop() == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    return [token for choice in choices for token in choice["token_ids"] or ()]


def _body(model: Path, prompt: list[int]) -> dict[str, Any]:
    told = {"model": str(model), "prompt": prompt, "max_tokens": 8, "temperature": 0}
    return told | {"ignore_eos": True, "return_token_ids": True}


def _metric(name: str) -> float:
    """Return what the decoding engine tells of itself."""
    for line in get(f"{DECODE}/metrics").splitlines():
        if line.startswith(name + "{"):
            return float(line.rpartition(" ")[2])
    raise LookupError(name)


PORTS = 14579, 14580

TRANSFER = {
    "kv_connector": "AsyncKVConnector",
    "kv_connector_module_path": "asynckv.integrations.vllm",
    "kv_role": "kv_consumer",
    "kv_connector_extra_config": {
        "peers": [f"tcp://127.0.0.1:{port}" for port in PORTS]
    },
}


@pytest.mark.timeout(400)
def test_a_decoder_loads_what_either_rank_has_computed(
    model: Path, tmp_path: Path
) -> None:
    prefill = [str(EXAMPLE / "prefill.sh"), str(model), *OPTIONS]
    prefill += ["--data-parallel-size", "2", "--api-server-count", "1"]
    decode = ["vllm", "serve", str(model), *OPTIONS, "--port", "8200"]
    decode += ["--kv-transfer-config", json.dumps(TRANSFER)]
    with (
        Command(prefill, tmp_path / "prefill.log") as first,
        Command(decode, tmp_path / "decode.log") as second,
    ):
        first.wait_ready(f"{PREFILL}/health")
        second.wait_ready(f"{DECODE}/health")
        computed_at = [_transfer(model, random_prompt(100, seed=n)) for n in range(8)]
        assert len(set(computed_at)) == 2
        assert _loads() == 8


def _transfer(model: Path, prompt: list[int]) -> str:
    """Return who has computed the prompt that was decoded elsewhere."""
    asked = {"do_remote_decode": True}
    carried = _ask(PREFILL, model, prompt, asked)["kv_transfer_params"]
    _ask(DECODE, model, prompt, carried)
    peer: str = carried["peer"]
    return peer


def _ask(url: str, model: Path, prompt: list[int], params: Any) -> Any:
    body = {"model": str(model), "prompt": prompt, "max_tokens": 1, "temperature": 0}
    body["kv_transfer_params"] = params
    return json.loads(get(f"{url}/v1/completions", body))


def _loads() -> float:
    name = "vllm:asynckv_loads_total{"
    lines = get(f"{DECODE}/metrics").splitlines()
    (found,) = [line for line in lines if line.startswith(name)]
    return float(found.rpartition(" ")[2])
