"""A crowd of hostile connections, a server, and one who only wants to work."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import asynckv
from harness.children import ask, line_of, running
from harness.crowd import LARGE

pytestmark = [
    pytest.mark.trust,
    pytest.mark.alone,
    pytest.mark.multiprocess,
    pytest.mark.timeout(300),
]

MIB = 2**20
BUDGET_BYTES = 64 * MIB
SPARE_BYTES = 64 * MIB
ROUNDS = 7
MOST_ROUNDS = 21
# Of the crowd about a third are thrown out at any moment, and come again.
UP = 100
KEPT = 0.5
ROUND_S = 1.0
SETTLED_S = 0.25
STEAL = 7  # of the columns of /proc/stat
SERVER = f"""
import asyncio, sys, asynckv
async def main():
    async with (
        asynckv.LookupBuffer({BUDGET_BYTES // 2}, max_hold_s=0.5, drain_s=0) as lookup,
        asynckv.StoreBuffer({BUDGET_BYTES // 2}) as store,
        asynckv.serve("tcp://127.0.0.1:0", lookup=lookup, store=store) as server,
    ):
        print(server.url, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
asyncio.run(main())
"""
BUSY = "print(flush=True)\nwhile True: pass"
CROWD = "import runpy; runpy.run_module('harness.crowd', run_name='__main__')"


@contextlib.contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """What this thread starts meanwhile, processes and threads, runs on these."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


async def turn(crowd: asyncio.subprocess.Process, word: str) -> int:
    """Let the crowd come or go; return how many of it are there."""
    answer, there = (await ask(crowd, word)).split()
    assert answer == word
    return int(there)


def memory_of(pid: int, what: str) -> int:
    """Bytes of a process: ``VmRSS`` is now, ``VmHWM`` the most there ever were."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(rf"{what}:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


async def work(lookup: asynckv.KVLookupBuffer) -> None:
    """An entry there and back, in line and by payload."""
    for numel in (10, 30_000):
        tensor = torch.full((numel,), 7)
        await lookup.insert([1, 1], None, tensor, None, None)
        entry = await lookup.drop_select([1, 1])
        assert isinstance(entry.key, torch.Tensor)
        assert torch.equal(entry.key, tensor)


def stolen_s() -> float:
    """Seconds that the host of a virtual machine has kept our core for others."""
    (core,) = os.sched_getaffinity(0)
    found = re.search(
        rf"^cpu{core} (.*)$", Path("/proc/stat").read_text(), re.MULTILINE
    )
    assert found is not None
    return int(found[1].split()[STEAL]) / os.sysconf("SC_CLK_TCK")


async def rate_of(lookup: asynckv.KVLookupBuffer) -> float:
    """How often a second of the core on which it and the server run."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(SETTLED_S)
    count, began, stolen = 0, loop.time(), stolen_s()
    while loop.time() < began + ROUND_S:
        await work(lookup)
        count += 1
    return count / (loop.time() - began - (stolen_s() - stolen))


def kept_in(rounds: list[tuple[float, float, int]]) -> float:
    """The second best rate of a siege beside the second best without one.

    What else the machine does only slows, now the one and now the other.
    """
    alone, besieged, _ = zip(*rounds, strict=True)
    return float(sorted(besieged)[-2] / sorted(alone)[-2])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, chooses cores")
async def test_who_is_honest_keeps_half_of_its_rate_and_memory_is_bounded(
    scale: Any, figures: Callable[[str], None]
) -> None:
    first, *others = sorted(os.sched_getaffinity(0))
    # The honest share a core at all times; what the crowd uses up is none of theirs.
    with on_cores({first}):
        rounds, growth = await siege(scale.hostile_connections, set(others) or {first})
    alone, besieged, there = zip(*rounds, strict=True)
    kept = kept_in(rounds)
    ratios = [after / before for before, after in zip(alone, besieged, strict=True)]
    figures(
        f"{scale.hostile_connections} connections, {min(there)} to {max(there)} of "
        f"them up at the end of a round and the others thrown out, the server grew by "
        f"{growth / MIB:.0f} MiB with a budget of {BUDGET_BYTES / MIB:.0f}, the honest "
        f"client kept {kept:.0%} of its rate "
        f"({', '.join(f'{ratio:.0%}' for ratio in ratios)})"
    )
    assert statistics.median(there) >= UP
    assert growth <= BUDGET_BYTES + SPARE_BYTES
    assert kept >= KEPT


async def siege(
    count: int, cores_of_the_crowd: set[int]
) -> tuple[list[tuple[float, float, int]], int]:
    """By round, the honest client's rate before a siege, its rate in it, and how
    many of the crowd were connected at its end; and the bytes by which the server
    has grown."""
    rounds: list[tuple[float, float, int]] = []
    async with running(SERVER) as server, contextlib.AsyncExitStack() as stack:
        url = await line_of(server)
        with on_cores(cores_of_the_crowd):
            crowd = await stack.enter_async_context(running(CROWD, url, str(count)))
            # Cores are not wholly apart: without a siege the others work as well.
            others = await stack.enter_async_context(running(BUSY))
        await line_of(others)
        peer = await stack.enter_async_context(asynckv.connect(url, reconnect_s=0))
        await peer.store.put(LARGE, torch.zeros(15_000, dtype=torch.int32))
        await rate_of(peer.lookup)
        before = memory_of(server.pid, "VmRSS")
        # More of them where the machine has so much else to do that seven say little.
        while len(rounds) < ROUNDS or (
            kept_in(rounds) < KEPT and len(rounds) < MOST_ROUNDS
        ):
            os.kill(others.pid, signal.SIGCONT)
            alone = await rate_of(peer.lookup)
            os.kill(others.pid, signal.SIGSTOP)
            await turn(crowd, "on")
            besieged = await rate_of(peer.lookup)
            rounds.append((alone, besieged, await turn(crowd, "off")))
        return rounds, memory_of(server.pid, "VmHWM") - before
