from __future__ import annotations

import asyncio
import collections
import random

from harness.simulation.interruptions import interrupt
from harness.simulation.machines import Machines
from harness.simulation.nodes import Process


def test_calls_are_cut_short_in_every_way_and_hear_of_it(machines: Machines) -> None:
    ends: collections.Counter[str] = collections.Counter()

    async def call() -> None:
        try:
            for _ in range(8):
                await asyncio.sleep(0.2)
            ends["through"] += 1
        except asyncio.CancelledError:
            ends["cancelled"] += 1
            raise

    async def main(process: Process) -> None:
        chance = random.Random(1)
        for _ in range(200):
            await interrupt(call(), chance, patience_s=100)
        ends["over"] += 1

    machines.add("one").start(main)
    assert machines.world.run(lambda: bool(ends["over"]), 10_000), machines.faults()
    assert ends["through"] > 100
    assert 20 < ends["cancelled"] < 100


def test_whoever_waits_for_a_call_takes_it_along(machines: Machines) -> None:
    ended = list[str]()

    async def call() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append("the call")

    async def main(process: Process) -> None:
        waiting = asyncio.create_task(
            interrupt(call(), random.Random(2), patience_s=1000)
        )
        await asyncio.sleep(1)
        waiting.cancel()
        await asyncio.wait({waiting})
        ended.append("who waits")

    machines.add("one").start(main)
    assert machines.world.run(lambda: len(ended) == 2, 100), machines.faults()
    assert ended == ["the call", "who waits"]
