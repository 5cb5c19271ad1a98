"""Testing your own scheduler against KV faults: a scheduler, and what it survives.

The fixtures come with asynckv, as a pytest plugin; they need pytest-asyncio.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
import torch

import asynckv
from asynckv.testing import KVFaults, KVPair

pytestmark = pytest.mark.asyncio
PROMPT = list(range(1000))


def prefill(prompt: list[int]) -> torch.Tensor:
    return torch.tensor(prompt).repeat(100, 1)  # 0.8 MB of "KV"


class Scheduler:
    """Decodes with KV of a peer where it can, and prefills here where it must."""

    def __init__(self, kv: asynckv.KVLookupBuffer, patience_s: float = 1) -> None:
        self.kv, self.patience_s = kv, patience_s
        self.reused = self.recomputed = 0

    async def decode(self, prompt: list[int]) -> int:
        try:
            async with asyncio.timeout(self.patience_s):
                async with self.kv.drop_select(prompt, match="exact") as entry:
                    answer = int(entry.key_tensor.sum())
            self.reused += 1
        except (TimeoutError, asynckv.AsyncKVError):
            answer = int(prefill(prompt).sum())
            self.recomputed += 1
        return answer


async def run(pair: KVPair, prompts: int = 1) -> Scheduler:
    """Prefill there, decode here; whatever happens, the answers are right."""
    scheduler = Scheduler(pair.peer.lookup)
    for prompt in (PROMPT[first:] for first in range(prompts)):
        await pair.lookup.insert(prompt, None, prefill(prompt), None, None)
        assert await scheduler.decode(prompt) == int(prefill(prompt).sum())
    return scheduler


async def test_kv_is_reused(kv_pair: KVPair) -> None:
    assert (await run(kv_pair, 3)).reused == 3


async def test_a_thin_line_costs_a_prefill(kv_faults: KVFaults) -> None:
    with kv_faults.rate(100_000):
        assert (await run(kv_faults)).recomputed == 1
    assert await kv_faults.peer.lookup.peek(PROMPT) == 1000  # it was given back


@pytest.mark.parametrize("seed", range(3))
async def test_a_flipped_bit_is_never_decoded(kv_faults: KVFaults, seed: int) -> None:
    with kv_faults.bit_flip(seed=seed, kind="lanes") as fault:
        assert (await run(kv_faults)).recomputed == fault.counts.acts == 1


async def test_a_connection_that_is_cut_is_made_again(kv_faults: KVFaults) -> None:
    with kv_faults.cut_after(10_000, kind="control") as fault:
        assert (await run(kv_faults, 3)).reused == 3
    assert fault.counts.acts == 1


if __name__ == "__main__":
    pytest_here = [sys.executable, "-m", "pytest", "-p", "asynckv.testing.plugin"]
    raise SystemExit(subprocess.call([*pytest_here, __file__]))
