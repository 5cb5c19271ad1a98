"""A report such as a run of the cache's demo leaves behind, with made-up figures."""

from __future__ import annotations

import pytest

from asynckv.cli.demo.cache.report import (
    CHUNK_TOKENS,
    CacheReport,
    Request,
    Step,
    read_workload,
)
from asynckv.cli.demo.report import Machine

__all__ = ("cache_report",)


def request(
    step: Step, prompt: int, blocks: int, first_s: float, tier: str = "memory"
) -> Request:
    """Return a request of which so many blocks were found."""
    return Request(
        part=step.part,
        name=step.name,
        engine=step.engine,
        prompt_tokens=prompt,
        found_tokens=blocks * CHUNK_TOKENS,
        computed_tokens=prompt - blocks * CHUNK_TOKENS,
        by_tier={tier: blocks} if blocks else {},
        first_token_s=first_s,
        engine_first_token_s=first_s - 0.001,
        tokens=(1, 2, 3),
    )


def played(*, shared: bool) -> tuple[Request, ...]:
    """Return what is asked before the kill: alone each engine begins with nothing."""
    done, steps = [], read_workload().steps
    for number, step in enumerate(steps[:6]):
        is_cold = number < (1 if shared else 2)
        blocks, first_s = (0, 2.5) if is_cold else (28, 0.25)
        done.append(request(step, 1800, blocks, first_s))
    for number, step in enumerate(steps[6:]):
        blocks = max(0, number - (0 if shared else 1)) * 2
        done.append(request(step, 130 * (number + 1), blocks, 0.2 + number / 10))
    return tuple(done)


@pytest.fixture
def cache_report() -> CacheReport:
    """Return the report of a run in which all went well."""
    new, old = (Step("killed", name, engine, "?") for name, engine in NEW_AND_OLD)
    return CacheReport(
        model="SmolLM2-135M-Instruct",
        chunk_tokens=CHUNK_TOKENS,
        block_bytes=2_949_120,
        memory_bytes=660_000_000,
        alone=played(shared=False),
        shared=played(shared=True),
        restarted=(request(new, 1800, 28, 0.3, "disk"), request(old, 1800, 28, 0.2)),
        cold=request(new, 1800, 0, 2.4),
        blocks_on_disk=42,
        blocks_missing=0,
        killed_pids=(4711, 4712),
        server_back_s=2.1,
        machine=Machine("0.1.0", "2026-01-02 03:04 UTC", "a CPU", "3.11.7", "2.13.0"),
        seconds=88.0,
    )


NEW_AND_OLD = (("the new engine", 2), ("the old engine", 1))
