"""The faults of one run: drawn from the seed beforehand, each with its time."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Final

from harness.simulation.machines import Machines
from harness.simulation.network import Connection
from harness.simulation.nodes import Node
from harness.simulation.world import Appointment

__all__ = ("Disturbance", "Troubles")

_KINDS: Final = {
    "cut": 5.0,
    "cut one side": 2.0,
    "cut after": 5.0,
    "duplicate": 3.0,
    "block": 3.0,
    "slow": 1.5,
    "freeze": 2.0,
    "crash": 2.0,
    "flip": 2.0,
}
_BAD_MEMORY_SHARE: Final = 0.3
"""In so many runs bits flip more often than all else happens together."""
_BAD_MEMORY: Final = 25.0
_FLIPS_FROM: Final = (48, 2048, 2048)
"""A heartbeat is seldom the only victim: it would take each flip of a quiet link."""
_LONGEST_S: Final = 20.0
_UNANSWERED_S: Final = 2.0
_AFTERMATH_S: Final = 12.0
"""So long after a fault a link may still be found dead."""


@dataclasses.dataclass(frozen=True)
class Disturbance:
    """When links of a client could be lost, for what reason."""

    client: str
    kind: str
    begin: float
    end: float


class Troubles:
    """Faults between one server and its clients.

    ``restart(node)`` starts a new process where one crashed; ``crashed(node)``
    is called just before it does.
    """

    def __init__(
        self,
        machines: Machines,
        server: Node,
        clients: list[Node],
        *,
        crash: Callable[[Node, bool], None],
        restart: Callable[[Node], None],
    ) -> None:
        self.disturbances: list[Disturbance] = []
        self.kinds: dict[str, int] = {}
        self._machines = machines
        self._world = machines.world
        self._network = machines.network
        self._server = server
        self._clients = clients
        self._crash_node = crash
        self._restart = restart
        self._chance = machines.world.chance("faults")
        self._server_crashes = self._chance.random() < 0.3
        self._has_bad_memory = self._chance.random() < _BAD_MEMORY_SHARE
        self._ahead: list[Appointment] = []
        self._ends: list[Callable[[], None]] = []

    def schedule(self, begin: float, end: float, count: int) -> None:
        """Let ``count`` faults begin between two times."""
        weights = dict(_KINDS)
        if self._has_bad_memory:
            weights["flip"] = _BAD_MEMORY
        does: dict[str, Callable[[Node, random.Random], None]] = {
            "cut": self._cut,
            "cut one side": self._cut_one_side,
            "cut after": self._cut_after,
            "duplicate": self._duplicate,
            "block": self._block,
            "slow": self._slow,
            "freeze": self._freeze,
            "crash": self._crash,
            "flip": self._flip,
        }
        for number in range(count):
            (kind,) = self._chance.choices([*weights], [*weights.values()])
            at = begin + (end - begin) * self._chance.random()
            chance = self._world.chance(f"fault {number}")
            client = self._chance.choice(self._clients)
            self._ahead.append(
                self._world.call_at(at, self._begin, kind, does[kind], client, chance)
            )

    def heal(self) -> None:
        """End every fault that still lasts, and begin no more."""
        for appointment in self._ahead:
            appointment.cancel()
        for connection in self._network.connections:
            for wire in (connection.there, connection.back):
                wire.flips, wire.cut_after = 0, None
        for end in list(self._ends):
            end()

    def was_disturbed(self, client: str, begin: float, end: float) -> bool:
        """Whether a link of that client may have been lost between two times."""
        return any(
            disturbance.client == client
            and disturbance.begin <= end
            and begin <= disturbance.end + _AFTERMATH_S
            for disturbance in self.disturbances
        )

    def _begin(
        self,
        kind: str,
        do: Callable[[Node, random.Random], None],
        client: Node,
        chance: random.Random,
    ) -> None:
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        do(client, chance)

    def _cut(self, client: Node, chance: random.Random) -> None:
        connection = self._draw_connection(client, chance)
        if connection is not None:
            self._note("cut", client, f"connection #{connection.number} is cut")
            connection.cut()

    def _cut_one_side(self, client: Node, chance: random.Random) -> None:
        connection = self._draw_connection(client, chance)
        if connection is not None:
            told = chance.choice(("dialler", "acceptor", "nobody"))
            text = f"connection #{connection.number} is cut; told is {told}"
            self._note("cut", client, text)
            connection.cut(dialler=told == "dialler", acceptor=told == "acceptor")

    def _cut_after(self, client: Node, chance: random.Random) -> None:
        connection = self._draw_connection(client, chance)
        if connection is None:
            return
        wire = chance.choice((connection.there, connection.back))
        wire.cut_after = chance.choice((1, 60, 300, 5000, 50_000))
        text = f"{wire.name} is to be cut after {wire.cut_after} more bytes"
        self._world.tell("fault", client.name, text)

        def cut() -> None:
            self._note("cut", client, f"{wire.name} is cut")
            connection.cut()

        wire.on_cut = cut

    def _duplicate(self, client: Node, chance: random.Random) -> None:
        """Lose answers, not what was asked: after the cut it is asked once more."""
        connection = self._draw_connection(client, chance)
        if connection is None:
            return
        seconds = _UNANSWERED_S * chance.random()
        text = f"answers on #{connection.number} are lost; cut in {seconds:.2f} s"
        self._note("duplicate", client, text, seconds)
        connection.back.die()  # clients dial
        text = f"connection #{connection.number} is cut"
        self._end_later(client, text, seconds, connection.cut)

    def _block(self, client: Node, chance: random.Random) -> None:
        one, other = client.host, self._server.host
        stretches = [(one, other), (other, one)]
        if chance.random() < 0.5:
            stretches = [chance.choice(stretches)]
        seconds = _LONGEST_S * chance.random() ** 2
        for stretch in stretches:
            self._network.block(*stretch)
        names = "both ways" if len(stretches) == 2 else f"from {stretches[0][0]}"
        self._note("block", client, f"blocked {names} for {seconds:.1f} s", seconds)

        def unblock() -> None:
            for stretch in stretches:
                self._network.unblock(*stretch)

        self._end_later(client, "unblocked", seconds, unblock)

    def _slow(self, client: Node, chance: random.Random) -> None:
        factor, seconds = chance.choice((10, 100, 1000)), _LONGEST_S * chance.random()
        one, other = client.host, self._server.host
        for stretch in ((one, other), (other, one)):
            self._network.slow(*stretch, factor)
        self._note("slow", client, f"{factor} times as slow, {seconds:.1f} s", seconds)

        def end() -> None:
            for stretch in ((one, other), (other, one)):
                self._network.slow(*stretch, 1)

        self._end_later(client, "as fast as before", seconds, end)

    def _freeze(self, client: Node, chance: random.Random) -> None:
        node = self._server if chance.random() < 0.3 else client
        seconds = chance.choice((0.5, 3.0, 7.0, 15.0)) * chance.random()
        self._note("freeze", node, f"frozen for {seconds:.1f} s", seconds)
        node.freeze(seconds)

    def _crash(self, client: Node, chance: random.Random) -> None:
        of_server = self._server_crashes and chance.random() < 0.5
        node = self._server if of_server else client
        if node.process is None:
            return
        power = chance.random() < 0.4
        seconds = chance.choice((0.01, 1.0, 10.0)) * chance.random()
        how = "loses its power" if power else "is killed"
        self._note("crash", node, f"{how}, for {seconds:.2f} s", seconds)
        self._crash_node(node, power)
        self._end_later(node, "starts again", seconds, lambda: self._restart(node))

    def _flip(self, client: Node, chance: random.Random) -> None:
        """Let a bit flip: of the most that is carried, as bit errors do, or of any."""
        found = self._network.between(client.host, self._server.host)
        wires = [wire for c in found for wire in (c.there, c.back)]
        if not wires:
            return
        (wire,) = chance.choices(wires, [1 + wire.carried_bytes for wire in wires])
        wire.flips_from = chance.choice(_FLIPS_FROM)
        wire.flips += 1
        self._world.call_later(_LONGEST_S, wire.flip_no_more)
        what = f"a bit of {wire.flips_from} bytes or more"
        self._note("flip", client, f"{wire.name} will flip {what}", _LONGEST_S)

    def _end_later(
        self, node: Node, text: str, seconds: float, end: Callable[[], None]
    ) -> None:
        def end_once() -> None:
            if end_once in self._ends:
                self._ends.remove(end_once)
                self._world.tell("fault", node.name, text)
                end()

        self._ends.append(end_once)
        self._world.call_later(seconds, self._end_if_it_lasts, end_once)

    def _end_if_it_lasts(self, end: Callable[[], None]) -> None:
        if end in self._ends:
            end()

    def _draw_connection(
        self, client: Node, chance: random.Random
    ) -> Connection | None:
        found = self._network.between(client.host, self._server.host)
        return chance.choice(found) if found else None

    def _note(self, kind: str, node: Node, text: str, seconds: float = 0.0) -> None:
        now = self._world.now
        self._world.tell("fault", node.name, text)
        clients = self._clients if node is self._server else [node]
        for client in clients:
            disturbance = Disturbance(client.name, kind, now, now + seconds)
            self.disturbances.append(disturbance)
