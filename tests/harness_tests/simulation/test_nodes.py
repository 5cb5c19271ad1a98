from __future__ import annotations

import asyncio

from harness.simulation.machines import Machines
from harness.simulation.nodes import Node, Process


class Counting:
    """A node that counts seconds."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.counts = list[tuple[int, int]]()
        self.cleaned_up = 0
        self.node: Node = machines.add("one")
        self.node.start(self.count)

    async def count(self, process: Process) -> None:
        try:
            for second in range(1000):
                self.counts.append((process.number, second))
                await asyncio.sleep(1)
        finally:
            self.cleaned_up += 1

    def run(self, seconds: float) -> int:
        before, world = len(self.counts), self.machines.world
        world.run(lambda: False, deadline=world.now + seconds)
        return len(self.counts) - before


def test_a_frozen_process_stands_still_and_goes_on(machines: Machines) -> None:
    counting = Counting(machines)
    assert counting.run(4.5) == 5
    counting.node.freeze(10)
    assert counting.run(9) == 0
    assert counting.run(4) >= 3


def test_a_process_that_crashed_cleans_nothing_up(machines: Machines) -> None:
    counting = Counting(machines)
    counting.run(3)
    counting.node.crash()
    assert counting.run(10) == 0
    assert counting.cleaned_up == 0


def test_another_process_comes_back_at_the_same_address(machines: Machines) -> None:
    counting = Counting(machines)
    counting.run(3)
    counting.node.crash(power=True)
    counting.node.start(counting.count)
    counting.run(2)
    assert counting.counts[-1][0] == 2
    pids = {process.pid for process in counting.node.processes}
    assert len(pids) == 2


def test_each_machine_has_a_clock_of_its_own(machines: Machines) -> None:
    clocks = {machines.add(name).clock_s for name in ("one", "two", "three")}
    assert len(clocks) == 3


def test_what_main_raises_is_a_fault_of_its_process(machines: Machines) -> None:
    async def main(process: Process) -> None:
        raise LookupError("nothing here")

    machines.add("one").start(main)
    machines.world.run(lambda: False, deadline=1)
    assert machines.faults() == ["one: main ended: LookupError('nothing here')"]
