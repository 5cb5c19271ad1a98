"""What ``examples/vllm_prefill_decode`` starts: two ``vllm serve``, and the proxy."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.vllm_engines import StartEngine, random_prompt
from harness.vllm_engines.commands import OPTIONS, Command, get

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.timeout(400),
]

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
