from __future__ import annotations

import random

from harness.simulation.contents import Wanted
from harness.simulation.history import History
from harness.simulation.machines import Machines
from harness.simulation.nodes import Process


def process_on(machines: Machines, name: str = "client1") -> Process:
    return Process(machines.add(name), 1)


def test_a_call_is_told_from_its_begin_to_its_end(machines: Machines) -> None:
    history, process = History(), process_on(machines)
    contents = history.library.new(random.Random(1))
    call = history.begin(process, "take", wanted=Wanted((1, 2)))
    history.receive(call, contents, 1)
    history.use(call)
    history.end(call, "ok")
    kinds = [line.kind for line in machines.world.story.lines]
    assert kinds == ["call", "has", "end"]
    assert call.delivery is not None
    assert call.delivery.was_used
    assert not history.open_calls()


def test_nothing_is_heard_of_a_process_that_crashed(machines: Machines) -> None:
    history, process = History(), process_on(machines)
    call = history.begin(process, "take", wanted=Wanted())
    history.crash(process)
    process.is_gone = True
    history.end(call, "ok")
    history.receive(call, history.library.new(random.Random(1)), 1)
    history.blame(call, "something")
    assert (call.outcome, call.delivery, history.wrong) == ("crashed", None, [])


def test_a_call_ends_once(machines: Machines) -> None:
    history, process = History(), process_on(machines)
    call = history.begin(process, "peek", wanted=Wanted((1,)))
    history.end(call, "cancelled")
    history.end(call, "ok")
    assert call.outcome == "cancelled"


def test_inserts_that_returned_are_known_by_id(machines: Machines) -> None:
    history, process = History(), process_on(machines)
    for number in range(1, 11):
        contents = history.library.new(random.Random(number))
        call = history.begin(process, "insert", contents)
        history.end(call, "cancelled" if number % 2 else "ok", f"id{number}")
    inserted = history.inserted()
    assert set(inserted) == {2, 4, 6, 8, 10}
    for number, entry_id in inserted.items():
        assert entry_id in (f"e{number}", f"id{number}")


def test_each_call_beside_the_buffer_is_a_consumer_of_its_own(
    machines: Machines,
) -> None:
    history, server = History(), process_on(machines, "server")
    server.is_server, client = True, process_on(machines)
    consumers = {
        history.begin(process, "take", wanted=Wanted()).consumer
        for process in (server, server, client, client)
    }
    assert len(consumers) == 3
