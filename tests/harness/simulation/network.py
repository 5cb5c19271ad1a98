"""The simulated network: who listens where, which connections there are.

Its faults are plain functions: a stretch between two nodes is blocked in one
direction or both, a connection is cut on both sides or on one.
"""

from __future__ import annotations

import errno
from typing import Final

from harness.simulation.sockets import SimulatedSocket
from harness.simulation.wires import Conditions, Wire
from harness.simulation.world import World

__all__ = ("Connection", "Network")

_FIRST_FREE_PORT: Final = 40_000
_SYN_AGAIN_S: Final = 1.0

_Address = tuple[str, int]
_Stretch = tuple[str, str]


class Connection:
    """Two wires between two hosts, and the sockets at their ends."""

    def __init__(
        self, number: int, there: Wire, back: Wire, dialler: SimulatedSocket
    ) -> None:
        self.number = number
        self.there = there
        self.back = back
        self.dialler = dialler
        self.acceptor: SimulatedSocket | None = None

    @property
    def hosts(self) -> _Stretch:
        """Who dialled, and whom."""
        return self.dialler.own_address[0], self.dialler.peer_address[0]

    @property
    def is_up(self) -> bool:
        """Whether both ends still use it."""
        ends = (self.dialler, self.acceptor)
        return all(end is not None and end.is_in_use for end in ends)

    def cut(self, *, dialler: bool = True, acceptor: bool = True) -> None:
        """End it; a side that is not told goes on and never hears again."""
        self.there.die()
        self.back.die()
        if dialler:
            self.dialler.receive_reset()
        if acceptor and self.acceptor is not None:
            self.acceptor.receive_reset()


class Network:
    """Wires between hosts under one set of conditions."""

    def __init__(self, world: World) -> None:
        self.conditions = Conditions.draw(world.chance("network"))
        self.connections: list[Connection] = []
        self.hosts_without_power: dict[str, None] = {}
        self._world = world
        self._chance = world.chance("slices")
        self._listeners: dict[_Address, SimulatedSocket] = {}
        self._blocked: dict[_Stretch, int] = {}
        self._slow: dict[_Stretch, float] = {}
        self._ports = _FIRST_FREE_PORT
        self._names: dict[str, str] = {}

    def name(self, host: str, node: str) -> None:
        """Let ``host`` be called ``node`` in the story."""
        self._names[host] = node

    def bind(self, sock: SimulatedSocket, address: _Address) -> _Address:
        """Let ``sock`` be found at ``address`` once it listens."""
        host, port = address
        if not port:
            self._ports += 1
            port = self._ports
        older = self._listeners.get((host, port))
        if older is not None:
            raise OSError(errno.EADDRINUSE, "somebody listens there")
        self._listeners[host, port] = sock
        return host, port

    def unbind(self, sock: SimulatedSocket) -> None:
        """Nobody listens with ``sock`` any more."""
        if self._listeners.get(sock.own_address) is sock:
            del self._listeners[sock.own_address]

    def dial(self, sock: SimulatedSocket, address: _Address) -> None:
        """Connect ``sock`` to whoever listens at ``address``."""
        self._ports += 1
        sock.own_address = (sock.own_address[0], self._ports)
        number = len(self.connections) + 1
        here, there = sock.own_address[0], address[0]
        outgoing = self._wire(here, there, number)
        incoming = self._wire(there, here, number)
        connection = Connection(number, outgoing, incoming, sock)
        self.connections.append(connection)
        sock.plug(outgoing, incoming, address)
        outgoing.receiver = _Door(self, connection, address)
        outgoing.open()

    def knock(self, connection: Connection, address: _Address) -> None:
        """A request to connect has come to ``address``."""
        if address[0] in self.hosts_without_power:
            if connection.dialler.is_connecting:
                self._world.call_later(_SYN_AGAIN_S, connection.there.open)
            return
        listener = self._listeners.get(address)
        if listener is None or not listener.is_listening:
            connection.back.reset()
            return
        sock = listener.accepted()
        sock.plug(connection.back, connection.there, connection.dialler.own_address)
        connection.acceptor = sock
        listener.backlog.append(sock)
        connection.back.open()

    def between(self, one: str, other: str) -> list[Connection]:
        """Return the connections that are up between two hosts, oldest first."""
        pair = {one, other}
        return [c for c in self.connections if c.is_up and set(c.hosts) == pair]

    def block(self, source: str, target: str) -> None:
        """Let nothing arrive at ``target`` that ``source`` sends."""
        self._blocked[source, target] = self._blocked.get((source, target), 0) + 1

    def unblock(self, source: str, target: str) -> None:
        """End one :meth:`block`; what was held back goes on."""
        self._blocked[source, target] -= 1
        if not self._blocked[source, target]:
            del self._blocked[source, target]
            for wire in self._wires(source, target):
                wire.unblock()

    def slow(self, source: str, target: str, factor: float) -> None:
        """Let everything between take so many times as long; 1 ends it."""
        self._slow[source, target] = factor
        for wire in self._wires(source, target):
            wire.slowness = factor

    def _wires(self, source: str, target: str) -> list[Wire]:
        found = []
        for connection in self.connections:
            if connection.hosts == (source, target):
                found.append(connection.there)
            elif connection.hosts == (target, source):
                found.append(connection.back)
        return found

    def _wire(self, source: str, target: str, number: int) -> Wire:
        names = self._names.get(source, source), self._names.get(target, target)
        wire = Wire(
            self._world,
            f"{names[0]} > {names[1]} #{number}",
            self.conditions,
            lambda: (source, target) in self._blocked,
            chance=self._chance,
        )
        wire.slowness = self._slow.get((source, target), 1.0)
        return wire


class _Door:
    """Where the first word of a connection arrives."""

    def __init__(
        self, network: Network, connection: Connection, address: _Address
    ) -> None:
        self._network = network
        self._connection = connection
        self._address = address

    def receive_open(self) -> None:
        self._network.knock(self._connection, self._address)

    def receive_bytes(self, data: bytes) -> bool:
        return False

    def receive_end(self) -> None:
        pass

    def receive_reset(self) -> None:
        pass

    def receive_silence(self) -> None:
        pass
