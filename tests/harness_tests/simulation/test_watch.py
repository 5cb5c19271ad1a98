from __future__ import annotations

import asyncio

from asynckv.buffers.lookup import LookupBuffer
from harness.simulation.contents import Wanted
from harness.simulation.history import History
from harness.simulation.machines import Machines
from harness.simulation.nodes import Process
from harness.simulation.watch import ANSWERED, Life, Watch


class Watched:
    """A watch over one buffer in one node."""

    def __init__(self, machines: Machines) -> None:
        self.history = History()
        self.watch = Watch(machines.world, self.history)
        self.node = machines.add("server")
        self.machines = machines
        self.node.start(self.serve)
        self.run(1)

    async def serve(self, process: Process) -> None:
        self.buffer = LookupBuffer(1000)
        self.watch.lives.append(Life(process, self.buffer, 0.0))
        await self.buffer.insert([1, 2], None, None, None, None, entry_id="e1")
        await asyncio.sleep(10_000)

    def run(self, seconds: float) -> list[str]:
        world = self.machines.world
        world.run(lambda: False, world.now + seconds)
        return self.watch.complaints


def test_nothing_is_complained_of_while_all_is_well(machines: Machines) -> None:
    watched = Watched(machines)
    watched.watch.look_on()
    watched.watch.look_for_matches()
    assert watched.run(10) == []


def test_more_bytes_than_the_bound_are_complained_of(machines: Machines) -> None:
    watched = Watched(machines)
    watched.buffer._arena.used_bytes = 2000
    watched.watch.look_on()
    assert "out of bounds" in watched.run(0.1)[0]


def test_bytes_of_nothing_are_complained_of(machines: Machines) -> None:
    watched = Watched(machines)
    watched.watch.look_at_rest()
    assert "nothing is left" in watched.watch.complaints[0]


def test_what_is_charged_for_nothing_can_be_asked_for_first(machines: Machines) -> None:
    watched = Watched(machines)
    assert "nothing is left" in watched.watch.charges()[0]
    with watched.node.inside() as process:
        process.loop.finish(watched.buffer.withdraw("e1"))
    assert watched.watch.charges() == []
    assert watched.watch.complaints == []


def test_calls_that_hang_are_named(machines: Machines) -> None:
    watched = Watched(machines)
    process = Process(machines.add("client1"), 1)
    watched.history.begin(process, "peek", wanted=Wanted((1,)))
    watched.history.begin(process, "take", wanted=Wanted((1,)))
    watched.watch.look_at_waits(ANSWERED)
    (complaint,) = watched.watch.complaints
    assert complaint.startswith("hung: call 1 peek [1]")


def test_what_is_left_behind_is_named(machines: Machines) -> None:
    watched = Watched(machines)
    watched.watch.look_behind(watched.node)
    assert "server left a task: Watched.serve" in watched.watch.complaints[0]


def test_why_entries_left_is_asked_of_the_buffer(machines: Machines) -> None:
    watched = Watched(machines)
    with watched.node.inside() as process:
        assert process.loop.finish(watched.buffer.withdraw("e1"))
    contents = watched.history.library.new(machines.world.chance("x"), streaming=True)
    call = watched.history.begin(process, "insert", contents)
    watched.history.end(call, "ok", "e1")
    watched.watch.look_at_rest()
    assert watched.watch.reasons == {1: "withdrawn"}
    assert watched.watch.complaints == []
