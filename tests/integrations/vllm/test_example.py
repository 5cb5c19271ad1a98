"""What ``examples/vllm_prefill_decode`` starts: two ``vllm serve``, and the proxy."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from harness.vllm_engines import StartEngine, random_prompt
from harness.vllm_engines.engine import ENVIRONMENT

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.timeout(400),
]

EXAMPLE = Path(__file__).parents[3] / "examples" / "vllm_prefill_decode"
PREFILL, DECODE, PROXY = (f"http://127.0.0.1:{port}" for port in (8100, 8200, 8000))
READY_S: Final = 200.0
OPTIONS = [
    *("--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32"),
    *("--block-size", "32", "--max-model-len", "1024", "--max-num-seqs", "8"),
    *("--num-gpu-blocks-override", "256"),
]


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
            url: stack.enter_context(_Command(command, tmp_path / f"{number}.log"))
            for number, (url, command) in enumerate(commands.items())
        }
        for url, command in started.items():
            _wait_ready(url, command)
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
            answer = json.loads(_get(f"{PROXY}/v1/completions", body))
            took[n].append(time.monotonic() - began)
            samples = [tuple(one["token_ids"]) for one in answer["choices"]]
            assert len(samples) == n and len(set(samples)) == 1
    assert _metric("vllm:asynckv_loads_total") == loaded + 12
    assert _metric("vllm:asynckv_failed_loads_total") == 0
    ratio = min(took[4]) / min(took[1])
    assert ratio <= 1.5, took
    return ratio


class _Command:
    """A command and all that it starts, until the end of the block."""

    def __init__(self, command: list[str], log: Path) -> None:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        serving = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PATH": path}
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT, **serving},
                start_new_session=True,
            )

    def __enter__(self) -> _Command:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _wait_ready(url: str, command: _Command) -> None:
    deadline = time.monotonic() + READY_S
    path = "/openapi.json" if url == PROXY else "/health"
    while True:
        with contextlib.suppress(OSError):
            _get(url + path)
            return
        log = command.log.read_text(errors="replace")[-4000:]
        assert command.process.poll() is None, log
        assert time.monotonic() < deadline, log
        threading.Event().wait(0.2)


def _complete(model: Path, prompt: list[int]) -> list[int]:
    answer = json.loads(_get(f"{PROXY}/v1/completions", _body(model, prompt)))
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def _stream(model: Path, prompt: list[int]) -> list[int]:
    body = _body(model, prompt) | {"stream": True}
    lines = _get(f"{PROXY}/v1/completions", body).splitlines()
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events.pop() == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    return [token for choice in choices for token in choice["token_ids"] or ()]


def _body(model: Path, prompt: list[int]) -> dict[str, Any]:
    told = {"model": str(model), "prompt": prompt, "max_tokens": 8, "temperature": 0}
    return told | {"ignore_eos": True, "return_token_ids": True}


def _metric(name: str) -> float:
    """Return what the decoding engine tells of itself."""
    for line in _get(f"{DECODE}/metrics").splitlines():
        if line.startswith(name + "{"):
            return float(line.rpartition(" ")[2])
    raise LookupError(name)


def _get(url: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        told: bytes = answer.read()
    return told.decode()
