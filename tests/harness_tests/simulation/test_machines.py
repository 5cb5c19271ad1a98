"""What befalls machines of a simulation does: to links, processes and bits."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import socket
import threading
from typing import Any

import pytest

from harness.simulation.machines import Machines, open_machines
from harness.simulation.nodes import Process
from harness.simulation.troubles import Troubles
from harness.simulation.wires import Conditions, Wire
from harness.simulation.world import Spinning, World

PAYLOAD = random.Random(2).randbytes(5000)


class Echo:
    """A node that echoes, one that asks, and what the latter sees."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.server, self.client = machines.add("server"), machines.add("client1")
        self.seen = list[str]()
        self.served_by, self.cleaned_up = 0, 0
        self.server.start(self.serve)
        self.client.start(self.ask)

    async def serve(self, process: Process) -> None:
        loop, self.served_by = asyncio.get_running_loop(), process.pid
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setblocking(False)
        listener.bind((process.host, 7000))
        listener.listen()
        try:
            while True:
                sock, _ = await loop.sock_accept(listener)
                while data := await loop.sock_recv(sock, 100):
                    await loop.sock_sendall(sock, data)
        finally:
            self.cleaned_up += 1

    async def ask(self, process: Process) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0.1)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            try:
                await loop.sock_connect(sock, (self.server.host, 7000))
                while True:
                    await loop.sock_sendall(sock, b"ping")
                    self.seen.append((await loop.sock_recv(sock, 100)).decode())
                    await asyncio.sleep(1)
            except OSError as exc:
                self.seen.append(type(exc).__name__)

    def run(self, seconds: float) -> int:
        """Let time pass; return how many pings were answered meanwhile."""
        before, world = len(self.seen), self.machines.world
        world.run(lambda: False, deadline=world.now + seconds)
        return len(self.seen) - before


@pytest.fixture
def echo(machines: Machines) -> Echo:
    echo = Echo(machines)
    assert echo.run(3.5) >= 2
    return echo


def test_a_blocked_stretch_delays_and_heals(echo: Echo) -> None:
    network, ends = echo.machines.network, (echo.server.host, echo.client.host)
    network.block(*ends)
    assert echo.run(20) <= 1
    network.unblock(*ends)
    assert echo.run(20) >= 15


def test_a_slow_stretch_answers_more_rarely(echo: Echo) -> None:
    echo.machines.network.slow(echo.server.host, echo.client.host, 1e6)
    assert echo.run(10) <= 3


@pytest.mark.parametrize(
    ("told", "last"),
    [({}, "ConnectionResetError"), ({"dialler": False}, "ping")],
    ids=["both sides", "not the dialler"],
)
def test_a_cut_connection_is_reset_for_who_is_told(
    echo: Echo, told: dict[str, Any], last: str
) -> None:
    (connection,) = echo.machines.network.between(echo.client.host, echo.server.host)
    connection.cut(**told)
    assert echo.run(100) <= 1 and echo.seen[-1] == last


def test_a_frozen_process_stands_still_and_goes_on(echo: Echo) -> None:
    echo.server.freeze(10)
    assert echo.run(9) <= 1
    assert echo.run(5) >= 3


def test_a_process_that_crashed_cleans_nothing_up_and_another_one_comes(
    echo: Echo,
) -> None:
    first = echo.served_by
    echo.server.crash(power=True)
    assert echo.run(10) <= 1
    echo.server.start(echo.serve)
    echo.run(2)
    assert echo.served_by != first and not echo.cleaned_up


async def fails(process: Process) -> None:
    raise LookupError("nothing here")


async def lets_a_thread_fail(process: Process) -> None:
    threading.Thread(target=lambda: int("x"), name="worker").start()


@pytest.mark.parametrize(
    ("main", "fault"),
    [
        (fails, "one: main ended: LookupError('nothing here')"),
        (lets_a_thread_fail, "one: thread worker: ValueError"),
    ],
)
def test_what_is_raised_is_a_fault_of_its_process(
    machines: Machines, main: Any, fault: str
) -> None:
    machines.add("one").start(main)
    machines.world.run(lambda: False, deadline=10)
    (told,) = machines.faults()
    assert told.startswith(fault)


def test_what_was_replaced_is_put_back() -> None:
    names = (os.urandom, socket.socket, threading.Thread, threading.Condition)
    with open_machines(seed=1):
        assert (os.urandom, socket.socket) != names[:2]
    assert (os.urandom, socket.socket, threading.Thread, threading.Condition) == names
    assert gc.isenabled()


def test_whoever_is_busy_for_ever_is_found() -> None:
    class Busy:
        is_runnable, wakes_at = True, None

        def turn(self) -> None:
            pass

    world = World(1)
    world.runnables.append(Busy())
    with pytest.raises(Spinning):
        world.run(lambda: False, deadline=1e9)


class Stretch:
    """A wire, where it ends, and the world it is in."""

    def __init__(self) -> None:
        self.data, self.world = bytearray(), World(1)
        conditions = Conditions(0.01, 0.01, 1000, 10_000)
        self.wire = Wire(
            *(self.world, "a > b", conditions, lambda: False), chance=random.Random(1)
        )
        self.wire.receiver = self

    def receive_bytes(self, data: bytes) -> bool:
        self.data += data
        return True

    def receive_open(self) -> None:
        raise NotImplementedError

    receive_end = receive_reset = receive_silence = receive_open

    def run(self) -> list[int]:
        """Let it pass; return how many bits of each byte have changed that did."""
        self.world.run(lambda: False, deadline=100)
        pairs = zip(self.data, PAYLOAD, strict=bool(self.data))
        return [(came ^ sent).bit_count() for came, sent in pairs if came != sent]


@pytest.fixture
def stretch() -> Stretch:
    stretch = Stretch()
    assert stretch.wire.send(memoryview(PAYLOAD)) == len(PAYLOAD)
    return stretch


@pytest.mark.parametrize(
    ("flips_from", "changed"), [(0, [1]), (1001, [])], ids=["any", "only large slices"]
)
def test_a_flip_changes_one_bit_of_a_slice_that_is_large_enough(
    stretch: Stretch, flips_from: int, changed: list[int]
) -> None:
    stretch.wire.flips, stretch.wire.flips_from = 1, flips_from
    assert stretch.run() == changed
    assert stretch.wire.flips == 1 - len(changed)
    assert stretch.wire.carried_bytes == len(PAYLOAD)


def test_a_dead_wire_swallows_everything(stretch: Stretch) -> None:
    stretch.wire.is_dead = True
    stretch.run()
    assert not stretch.data


def test_a_wire_tells_when_so_many_bytes_have_come(stretch: Stretch) -> None:
    told = list[int]()
    stretch.wire.cut_after = 2000
    stretch.wire.on_cut = lambda: told.append(len(stretch.data))
    stretch.run()
    assert len(told) == 1 and 2000 <= told[0] <= 3000


async def idle(process: Process) -> None:
    await asyncio.sleep(10_000)


@pytest.fixture
def troubles(machines: Machines) -> Troubles:
    server, client = machines.add("server"), machines.add("client1")
    for node in (server, client):
        node.start(idle)
    return Troubles(
        *(machines, server, [client]),
        crash=lambda node, power: node.crash(power=power),
        restart=lambda node: node.start(idle),
    )


def test_faults_are_told_and_remembered_until_they_heal(
    machines: Machines, troubles: Troubles
) -> None:
    troubles.schedule(1, 50, 60)
    machines.world.run(lambda: False, 40)
    told = [line for line in machines.world.story.lines if line.kind == "fault"]
    begun = sum(troubles.kinds.values())
    assert 40 < begun < 60 and len(told) >= 10
    assert troubles.was_disturbed("client1", 0, 60)
    assert not troubles.was_disturbed("client9", 0, 60)
    troubles.heal()
    machines.world.run(lambda: False, 100)
    assert sum(troubles.kinds.values()) == begun
    assert all(node.process is not None for node in machines.nodes.values())
    assert machines.network._blocked == {}
