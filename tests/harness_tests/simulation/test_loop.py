from __future__ import annotations

import asyncio
import random
import selectors

import anyio

from harness.simulation.loop import VirtualSelector
from harness.simulation.machines import Machines
from harness.simulation.nodes import Process


def test_an_hour_passes_in_no_time_and_callbacks_keep_their_order(
    machines: Machines,
) -> None:
    seen = list[object]()

    async def main(process: Process) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        for number in range(5):
            loop.call_soon(seen.append, number)
        await asyncio.sleep(3600)
        seen.append(round(loop.time() - started))

    machines.add("one").start(main)
    assert machines.world.run(lambda: len(seen) == 6, deadline=4000)
    assert seen == [0, 1, 2, 3, 4, 3600]


def test_timeouts_of_asyncio_and_anyio_follow_virtual_time(machines: Machines) -> None:
    seen = list[str]()

    async def main(process: Process) -> None:
        try:
            async with asyncio.timeout(10):
                await asyncio.get_running_loop().create_future()
        except TimeoutError:
            seen.append(f"{machines.world.now:.2f}")
        with anyio.move_on_after(5):
            await asyncio.get_running_loop().create_future()
        seen.append(f"{machines.world.now:.2f}")

    machines.add("one").start(main)
    assert machines.world.run(lambda: len(seen) == 2, deadline=100)
    assert seen == ["10.00", "15.00"]


def test_no_loop_is_left_running(machines: Machines) -> None:
    async def main(process: Process) -> None:
        await asyncio.sleep(1)

    node = machines.add("one")
    node.start(main)
    machines.world.run(lambda: False, deadline=2)
    assert asyncio._get_running_loop() is None


class Descriptor:
    is_readable = is_writable = False

    def __init__(self, number: int) -> None:
        self.number = number

    def fileno(self) -> int:
        return self.number


def test_what_is_watched_is_known_by_itself_and_by_its_descriptor() -> None:
    one, other = Descriptor(3), Descriptor(4)
    selector = VirtualSelector({3: one, 4: other}, random.Random(1))
    key = selector.register(one, selectors.EVENT_READ)
    known = selector.get_map()
    assert known[one] is known[3] is key and list(known) == [3]
    assert known.get(other) is None and len(known) == 1
