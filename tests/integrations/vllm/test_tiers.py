"""Engines that share a store on tiers: what they may lose is time, and nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.vllm_engines import (
    Engine,
    StartEngine,
    free_url,
    random_prompt,
    transfer,
)
from harness.vllm_engines.commands import get

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

CHUNK = 64
"""Two blocks."""
LENGTH = 200
CHUNKS = LENGTH // CHUNK


class StoreProcess:
    """``asynckv serve`` at ``url``, with a disk below its memory."""

    def __init__(self, url: str, folder: Path) -> None:
        http = free_url().removeprefix("tcp://")
        self._metrics = f"http://{http}/metrics"
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "asynckv", "serve", "--listen", url),
                *("--store", "16MiB", "--tier", f"disk:{folder}?max=256MiB"),
                *("--http", http),
            ],
            stdout=subprocess.PIPE,
        )

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline()

    def wait_for(self, chunks: int) -> int:
        """Wait until its disk has taken so many, or not: return how many it has."""
        deadline = time.monotonic() + 60
        while self.count("accepted_total") + self._lost() < chunks:
            assert time.monotonic() < deadline, "chunks are not stored"
            threading.Event().wait(0.05)
        return chunks - int(self._lost())

    def _lost(self) -> float:
        """A disk that is slow is not waited for."""
        return self.count("dropped_total") + self.count("unwritten_total")

    def count(self, name: str) -> float:
        """Return what is counted of the disk."""
        for line in get(self._metrics).splitlines():
            if line.startswith(f'asynckv_tier_{name}{{tier="disk"}}'):
                return float(line.split()[-1])
        raise AssertionError(f"there is no {name}")

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait()


@contextlib.contextmanager
def storing(url: str, folder: Path) -> Iterator[StoreProcess]:
    store = StoreProcess(url, folder)
    try:
        store.wait_ready()
        yield store
    finally:
        store.process.kill()
        store.process.communicate()


def prompts(first_seed: int) -> list[list[int]]:
    return [random_prompt(LENGTH, seed=first_seed + number) for number in range(12)]


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_an_engine_started_cold_finds_what_was_computed_before_all_were_killed(
    start_engine: StartEngine, alone: Engine, tmp_path: Path, policy: str
) -> None:
    url, asked = free_url(), prompts(100)
    config = transfer("kv_both", policy, mode="store", store=url, chunk_tokens=CHUNK)
    right = [alone.ask(prompt).tokens for prompt in asked]
    with storing(url, tmp_path) as store, start_engine(config) as first:
        first.wait_ready()
        assert [first.ask(prompt).tokens for prompt in asked] == right
        stored = store.wait_for(len(asked) * CHUNKS)
        store.signal(signal.SIGKILL)
        first.kill()
    with storing(url, tmp_path) as store, start_engine(config) as second:
        second.wait_ready()
        assert [second.ask(prompt).tokens for prompt in asked] == right
        hits = second.external_hits()
        assert 0 < hits <= stored * CHUNK
        assert hits == stored * CHUNK or stored < len(asked) * CHUNKS
        assert store.count("hits_total") >= hits // CHUNK


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_store_that_freezes_or_dies_between_requests_costs_no_request(
    start_engine: StartEngine, alone: Engine, tmp_path: Path, policy: str
) -> None:
    url, asked = free_url(), prompts(200)
    config = transfer("kv_both", policy, mode="store", store=url, chunk_tokens=CHUNK)
    right = [alone.ask(prompt).tokens for prompt in asked]
    # Its own blocks would answer for those of the store.
    with (
        storing(url, tmp_path) as store,
        start_engine(config, enable_prefix_caching=False) as engine,
    ):
        engine.wait_ready()
        assert [engine.ask(prompt).tokens for prompt in asked[:4]] == right[:4]
        store.wait_for(4 * CHUNKS)
        assert engine.ask(asked[0]).tokens == right[0]
        assert engine.external_hits() == CHUNKS * CHUNK
        store.signal(signal.SIGSTOP)
        assert [engine.ask(prompt).tokens for prompt in asked[:8]] == right[:8]
        store.signal(signal.SIGCONT)
        assert [engine.ask(prompt).tokens for prompt in asked[4:8]] == right[4:8]
        store.signal(signal.SIGKILL)
        assert [engine.ask(prompt).tokens for prompt in asked] == right
        assert engine.external_hits() >= CHUNKS * CHUNK
