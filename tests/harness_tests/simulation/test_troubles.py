from __future__ import annotations

import asyncio
import contextlib
import random
import socket

import pytest

from harness.simulation.machines import Machines
from harness.simulation.nodes import Node, Process
from harness.simulation.troubles import Troubles


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


def connect(machines: Machines, count: int) -> None:
    """Let the client have so many connections to the server."""
    server, client = machines.nodes["server"], machines.nodes["client1"]
    with server.inside():
        listener = socket.socket()
        listener.bind((server.host, 7000))
        listener.listen()
    for _ in range(count):
        with client.inside(), contextlib.suppress(BlockingIOError):
            socket.socket().connect((server.host, 7000))
    machines.world.run(lambda: False, machines.world.now + 1)
    with server.inside():
        for _ in range(count):
            listener.accept()


def test_bits_flip_where_bytes_are_carried(
    machines: Machines, troubles: Troubles
) -> None:
    connect(machines, 3)
    busy = machines.network.connections[1].back
    busy.carried_bytes = 10**9
    client = machines.nodes["client1"]
    for seed in range(20):
        troubles._flip(client, random.Random(seed))
    assert busy.flips == 20


def test_a_flip_that_nothing_large_was_there_for_is_called_off(
    machines: Machines, troubles: Troubles
) -> None:
    connect(machines, 1)
    troubles._flip(machines.nodes["client1"], random.Random(1))
    machines.world.run(lambda: False, machines.world.now + 21)
    (connection,) = machines.network.connections
    assert connection.there.flips == connection.back.flips == 0


def test_answers_are_lost_before_a_cut_that_makes_a_client_ask_again(
    machines: Machines, troubles: Troubles
) -> None:
    connect(machines, 1)
    (connection,) = machines.network.connections
    troubles._duplicate(machines.nodes["client1"], random.Random(1))
    assert connection.back.is_dead
    assert not connection.there.is_dead
    machines.world.run(lambda: False, machines.world.now + 3)
    assert connection.there.is_dead
