from __future__ import annotations

import asyncio
import collections
import random

from asynckv.buffers.lookup import LookupBuffer
from harness.simulation.applications import Application
from harness.simulation.history import History
from harness.simulation.machines import Machines
from harness.simulation.nodes import Process


def test_an_application_makes_calls_of_every_kind(machines: Machines) -> None:
    history, world = History(), machines.world
    tasks = list[asyncio.Task[None]]()

    async def main(process: Process) -> None:
        lookup = LookupBuffer("10MiB")
        for seed in range(4):
            application = Application(
                process,
                lookup,
                history,
                random.Random(seed),
                is_over=lambda: world.now > 100,
                think_s=0.1,
            )
            tasks.append(asyncio.create_task(application.run()))
        await asyncio.wait(tasks)

    machines.add("one").start(main)
    world.run(lambda: False, 130)
    verbs = collections.Counter(call.verb for call in history.calls)
    assert set(verbs) == {
        "insert",
        "write",
        "take",
        "borrow",
        "read",
        "peek",
        "taken",
        "withdraw",
    }
    assert machines.faults() == []
    assert history.wrong == []
