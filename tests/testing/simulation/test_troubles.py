from __future__ import annotations

import asyncio

import pytest

from asynckv.testing.simulation.machines import Machines
from asynckv.testing.simulation.nodes import Node, Process
from asynckv.testing.simulation.troubles import Troubles


async def idle(process: Process) -> None:
    await asyncio.sleep(10_000)


@pytest.fixture
def troubles(machines: Machines) -> Troubles:
    server, client = machines.add("server"), machines.add("client1")

    def crash(node: Node, power: bool) -> None:
        node.crash(power=power)

    def restart(node: Node) -> None:
        node.start(idle)

    for node in (server, client):
        node.start(idle)
    return Troubles(machines, server, [client], crash=crash, restart=restart)


def test_faults_are_told_and_remembered(machines: Machines, troubles: Troubles) -> None:
    troubles.schedule(1, 50, 40)
    machines.world.run(lambda: False, 60)
    told = [line for line in machines.world.story.lines if line.kind == "fault"]
    assert sum(troubles.kinds.values()) == 40
    assert len(told) >= 10
    assert troubles.was_disturbed("client1", 0, 60)
    assert not troubles.was_disturbed("client9", 0, 60)


def test_after_healing_everything_works(machines: Machines, troubles: Troubles) -> None:
    troubles.schedule(1, 50, 60)
    machines.world.run(lambda: False, 30)
    troubles.heal()
    begun = sum(troubles.kinds.values())
    machines.world.run(lambda: False, 100)
    assert sum(troubles.kinds.values()) == begun
    assert all(node.process is not None for node in machines.nodes.values())
    assert machines.network._blocked == {}
