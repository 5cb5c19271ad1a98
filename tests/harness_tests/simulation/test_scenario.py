from __future__ import annotations

from harness.simulation.machines import Machines, open_machines
from harness.simulation.scenario import Scenario


def test_a_run_ends_empty_and_leaves_nothing_behind(machines: Machines) -> None:
    scenario = Scenario(machines, min_events=300)
    scenario.run()
    assert scenario.watch.complaints == []
    assert machines.faults() == []
    assert len(scenario.history.calls) > 20
    notes = [line.text for line in machines.world.story.lines if line.kind == "note"]
    assert notes[-1] == "everybody closes"


def test_servers_and_clients_that_crash_come_back() -> None:
    with open_machines(seed=3) as machines:
        scenario = Scenario(machines, min_events=300)
        for at, node in ((2.0, scenario.server), (3.0, scenario.clients[0])):
            machines.world.call_at(at, scenario._crash, node, at > 2)
            machines.world.call_at(at + 0.5, scenario._start, node)
        scenario.run()
    assert len(scenario.watch.lives) == 2
    assert len(scenario.clients[0].processes) == 2
    assert scenario.watch.complaints == []
