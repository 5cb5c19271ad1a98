"""Engines that share a store on tiers: what they may lose is time, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.vllm_engines import (
    Engine,
    StartEngine,
    free_url,
    random_prompt,
    transfer,
)
from harness.vllm_engines.stores import storing

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


def prompts(first_seed: int) -> list[list[int]]:
    return [random_prompt(LENGTH, seed=first_seed + number) for number in range(12)]


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_an_engine_started_cold_finds_what_was_computed_before_all_were_killed(
    start_engine: StartEngine, alone: Engine, tmp_path: Path, policy: str
) -> None:
    url, asked, disk = free_url(), prompts(100), f"disk:{tmp_path}?max=256MiB"
    config = transfer("kv_both", policy, mode="store", store=url, chunk_tokens=CHUNK)
    right = [alone.ask(prompt).tokens for prompt in asked]
    with storing(url, disk) as store, start_engine(config) as first:
        first.wait_ready()
        assert [first.ask(prompt).tokens for prompt in asked] == right
        stored = store.wait_for(len(asked) * CHUNKS)
        store.kill()
        first.kill()
    with storing(url, disk) as store, start_engine(config) as second:
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
    url, asked, disk = free_url(), prompts(200), f"disk:{tmp_path}?max=256MiB"
    config = transfer("kv_both", policy, mode="store", store=url, chunk_tokens=CHUNK)
    right = [alone.ask(prompt).tokens for prompt in asked]
    # Its own blocks would answer for those of the store.
    with (
        storing(url, disk) as store,
        start_engine(config, enable_prefix_caching=False) as engine,
    ):
        engine.wait_ready()
        assert [engine.ask(prompt).tokens for prompt in asked[:4]] == right[:4]
        store.wait_for(4 * CHUNKS)
        assert engine.ask(asked[0]).tokens == right[0]
        assert engine.external_hits() == CHUNKS * CHUNK
        store.freeze()
        assert [engine.ask(prompt).tokens for prompt in asked[:8]] == right[:8]
        store.thaw()
        assert [engine.ask(prompt).tokens for prompt in asked[4:8]] == right[4:8]
        store.kill()
        assert [engine.ask(prompt).tokens for prompt in asked] == right
        assert engine.external_hits() >= CHUNKS * CHUNK
