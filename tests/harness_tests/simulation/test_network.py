from __future__ import annotations

import asyncio
import socket

import pytest

from harness.simulation.machines import Machines
from harness.simulation.nodes import Node, Process


class Echo:
    """A node that echoes, one that asks, and what the latter sees."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.server, self.client = machines.add("server"), machines.add("client")
        self.seen = list[str]()
        self.server.start(self.serve)
        self.client.start(self.ask)

    async def serve(self, process: Process) -> None:
        loop = asyncio.get_running_loop()
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setblocking(False)
        listener.bind((process.host, 7000))
        listener.listen()
        while True:
            sock, _ = await loop.sock_accept(listener)
            while data := await loop.sock_recv(sock, 100):
                await loop.sock_sendall(sock, data)

    async def ask(self, process: Process) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0.1)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            try:
                await loop.sock_connect(sock, (self.server.host, 7000))
                while True:
                    await loop.sock_sendall(sock, b"ping")
                    answer = (await loop.sock_recv(sock, 100)).decode()
                    self.seen.append(answer)
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
    network = echo.machines.network
    network.block(echo.server.host, echo.client.host)
    assert echo.run(20) <= 1
    network.unblock(echo.server.host, echo.client.host)
    assert echo.run(20) >= 15


def test_a_cut_connection_is_reset_on_both_sides(echo: Echo) -> None:
    (connection,) = echo.machines.network.between(echo.client.host, echo.server.host)
    connection.cut()
    echo.run(3)
    assert echo.seen[-1] == "ConnectionResetError"


def test_a_side_that_is_not_told_of_the_cut_hears_nothing(echo: Echo) -> None:
    (connection,) = echo.machines.network.between(echo.client.host, echo.server.host)
    connection.cut(dialler=False)
    assert echo.run(100) <= 1
    assert echo.seen[-1] == "ping"


def test_a_slow_stretch_answers_more_rarely(echo: Echo) -> None:
    network = echo.machines.network
    network.slow(echo.server.host, echo.client.host, 1e6)
    assert echo.run(10) <= 3


def test_no_two_listen_at_one_address(machines: Machines) -> None:
    seen = list[str]()

    async def main(process: Process) -> None:
        with socket.socket() as one, socket.socket() as two:
            one.bind((process.host, 7000))
            try:
                two.bind((process.host, 7000))
            except OSError as exc:
                seen.append(str(exc.strerror))

    node: Node = machines.add("one")
    node.start(main)
    assert machines.world.run(lambda: bool(seen), deadline=1)
