"""One run: a server of a lookup buffer, its clients, their calls, the faults.

It has four parts: applications make calls while faults happen; the faults end
and what is under way settles; fresh consumers take what is left; everybody
closes and nothing may be left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import random
from collections.abc import Coroutine, Iterator
from typing import Any, Final

from asynckv import AsyncKVError, KVLookupBuffer, LookupBuffer, Peer, connect, serve
from asynckv.buffers.statistics import LookupStatistics
from harness.simulation.applications import Application
from harness.simulation.history import History
from harness.simulation.machines import Machines
from harness.simulation.nodes import Node, Process
from harness.simulation.troubles import Troubles
from harness.simulation.watch import ANSWERED, ENDING, Life, Watch, where

__all__ = (
    "Scenario",
    "Settings",
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes, bounds and numbers of one run."""

    max_bytes: int
    """Of the buffer: small enough that inserts wait for room."""
    receive_bytes: int
    max_deliver: int
    max_hold_s: float | None
    clients: int
    applications: int
    """As many at a time on each client."""
    local_applications: int
    """And as many beside the buffer itself."""
    lanes: int
    think_s: float
    faults: int
    min_events: int

    @classmethod
    def draw(cls, chance: random.Random, min_events: int, *, is_fast: bool) -> Settings:
        """Draw them; a slow network needs more time to carry an entry."""
        return cls(
            max_bytes=chance.choice((300_000, 500_000, 3_000_000)),
            receive_bytes=chance.choice((250_000, 2_000_000)),
            max_deliver=chance.choice((2, 5)),
            max_hold_s=chance.choice((None, None, 4.0 if is_fast else 40.0)),
            clients=chance.randint(2, 4),
            applications=chance.randint(2, 4),
            local_applications=chance.randint(0, 2),
            lanes=chance.randint(1, 3),
            think_s=chance.choice((0.1, 0.4)),
            faults=chance.choice((0, 4, 10, 20)),
            min_events=min_events,
        )

    def __str__(self) -> str:
        fields = dataclasses.asdict(self).items()
        return ", ".join(f"{name}={value}" for name, value in fields)


_PORT: Final = 7000
_LOAD_S: Final = 20.0
_SHORT_S: Final = 8.0
_MAX_LOAD_S: Final = 400.0
_SETTLE_S: Final = 45.0
_DRAIN_S: Final = 60.0
_DEAD_LANE_S: Final = 36.0
"""Nobody was told that a lane is dead: its link ends so late after it was needed. One
client's insert may have the room that another one's waits for."""
_RECENT_S: Final = 5.0
"""What ended here is heard of everywhere else so soon."""
_DRAINS: Final = 3
"""As many deliveries as an entry may be inserted for."""
_CLOSE_S: Final = 30.0
_AFTER_S: Final = 5.0
_POLL_S: Final = 0.5
_CANCEL_S: Final = 5.0
_MUCH_BYTES: Final = 2**24
_TOO_MANY: Final = 10_000


class Scenario:
    """Everything of one run but its judgement."""

    def __init__(self, machines: Machines, min_events: int) -> None:
        self.machines = machines
        self.world = machines.world
        self.settings = Settings.draw(
            self.world.chance("settings"),
            min_events,
            is_fast=machines.network.conditions.is_fast,
        )
        self.history = History()
        self.watch = Watch(self.world, self.history)
        self.server = machines.add("server")
        count = range(1, self.settings.clients + 1)
        self.clients = [machines.add(f"client{number}") for number in count]
        self.troubles = Troubles(
            machines,
            self.server,
            self.clients,
            crash=self._crash,
            restart=self._start,
        )
        self.closing_at = math.inf
        self._is_over = False
        self._is_closing = False
        self._closed: list[str] = []

    def run(self) -> None:
        """Run all four parts."""
        self.load()
        self.settle()
        self.drain()
        self.close()

    def load(self) -> None:
        """Let applications call while faults happen."""
        self.world.tell("note", "", f"{self.settings}")
        for node in (self.server, *self.clients):
            self._start(node)
        self.troubles.schedule(0.5, _LOAD_S, self.settings.faults)
        self.watch.look_on()
        self.watch.look_for_matches()
        self.world.run(self._is_enough, _MAX_LOAD_S)
        self._is_over = True

    def settle(self) -> None:
        """End the faults, and let what is under way end that can."""
        self.world.tell("note", "", "no more faults, no more calls")
        self.troubles.heal()
        self.world.run(
            lambda: not self.history.open_calls(), self.world.now + _SETTLE_S
        )
        self.watch.look_at_waits(ANSWERED)

    def drain(self) -> None:
        """Let fresh consumers take what is left."""
        self.world.tell("note", "", "fresh consumers take what is left")
        for number in range(1, _DRAINS + 1):
            self.machines.add(f"drain{number}").start(self._take_all)
        longest_s = _DRAIN_S + _DEAD_LANE_S * len(self.clients)
        self.world.run(
            lambda: self._is_empty() or self._is_too_much(), self.world.now + longest_s
        )
        if self._is_empty():
            self.world.run(lambda: not self.watch.charges(), self.world.now + _RECENT_S)
            self.watch.look_at_rest()
        else:
            self.watch.complain(f"left: {self._statistics()}")
            self.watch.look_at_waits(ENDING)

    def close(self) -> None:
        """Let everybody close, and look at what is left behind."""
        self.world.tell("note", "", "everybody closes")
        self._is_closing = True
        self.closing_at = self.world.now
        nodes = [node for node in self.machines.nodes.values() if node.process]
        if not self.world.run(
            lambda: len(self._closed) == len(nodes), self.world.now + _CLOSE_S
        ):
            hanging = sorted({node.name for node in nodes} - set(self._closed))
            self.watch.complain(f"does not close: {', '.join(hanging)}")
        self.world.run(lambda: False, self.world.now + _AFTER_S)
        for node in nodes:
            self.watch.look_behind(node)

    def _is_too_much(self) -> bool:
        return self.world.story.events > _TOO_MANY + 10 * self.settings.min_events

    def _is_enough(self) -> bool:
        events, now = self.world.story.events, self.world.now
        if events < self.settings.min_events:
            return False
        is_much = events >= 2 * self.settings.min_events
        return now >= _LOAD_S or (is_much and now >= _SHORT_S)

    def _is_empty(self) -> bool:
        now = self._statistics()
        return not (now.entries or now.waiting_inserts or now.leased) and not any(
            call.verb in ENDING for call in self.history.open_calls()
        )

    def _statistics(self) -> LookupStatistics:
        life = self.watch.lives[-1]
        with life.process.node.inside():
            return life.buffer.statistics()

    # The processes.

    def _start(self, node: Node) -> None:
        node.start(self._serve if node is self.server else self._use)

    def _crash(self, node: Node, power: bool) -> None:
        if node.process is not None:
            self.history.crash(node.process)
            if node is self.server:
                self.watch.lives[-1].end = self.world.now
        node.crash(power=power)

    async def _serve(self, process: Process) -> None:
        process.is_server = True
        settings = self.settings
        buffer = LookupBuffer(
            settings.max_bytes,
            max_deliver=settings.max_deliver,
            max_hold_s=settings.max_hold_s,
            drain_s=0,
        )
        self.watch.lives.append(Life(process, buffer, self.world.now))
        async with (
            buffer,
            serve(
                f"tcp://{process.host}:{_PORT}",
                lookup=buffer,
                identity="server",
                lanes=settings.lanes,
            ),
        ):
            await self._apply(process, buffer, settings.local_applications)
        self._closed.append(process.node.name)

    async def _use(self, process: Process) -> None:
        while not self._is_closing:
            with self._told(process):
                async with self._connect(process, self.settings.receive_bytes) as peer:
                    self.watch.peers.append((process, peer))
                    await self._apply(process, peer.lookup, self.settings.applications)
            await asyncio.sleep(_POLL_S)
        self._closed.append(process.node.name)

    async def _take_all(self, process: Process) -> None:
        while not self._is_closing:
            with self._told(process):
                async with self._connect(process, _MUCH_BYTES) as peer:
                    application = self._application(process, peer.lookup, 0)
                    await self._run([application], application.take_all())
            await asyncio.sleep(_POLL_S)
        self._closed.append(process.node.name)

    async def _apply(
        self, process: Process, lookup: KVLookupBuffer, count: int
    ) -> None:
        numbers = range(1, count + 1)
        applications = [self._application(process, lookup, n) for n in numbers]
        await self._run(applications, *(a.run() for a in applications))

    async def _run(
        self, applications: list[Application], *runs: Coroutine[Any, Any, None]
    ) -> None:
        """Run applications until they have lost their peer, or all closes."""
        tasks = [asyncio.create_task(run, name="an application") for run in runs]
        try:
            while not self._is_closing and not any(  # noqa: ASYNC110 - the world tells
                a.is_lost for a in applications
            ):
                await asyncio.sleep(_POLL_S)
        finally:
            for task in tasks:
                task.cancel()
        if tasks:
            _, hanging = await asyncio.wait(tasks, timeout=_CANCEL_S)
            for task in hanging:
                self.watch.complain(
                    f"cancelled, and still waits: {where(task.get_coro())}"
                )
            for task in tasks:
                if task in hanging or task.cancelled():
                    continue
                if (error := task.exception()) is not None:
                    self.watch.complain(f"an application failed: {error!r}")

    def _connect(self, process: Process, max_bytes: int) -> Peer:
        return connect(
            f"tcp://{self.server.host}:{_PORT}",
            identity=process.node.name,
            lanes=self.settings.lanes,
            max_bytes=max_bytes,
        )

    def _application(
        self, process: Process, lookup: KVLookupBuffer, number: int
    ) -> Application:
        name = f"application {number} of process {process.number}"
        return Application(
            process,
            lookup,
            self.history,
            self.world.chance(f"{name} of {process.node.name}"),
            is_over=lambda: self._is_over,
            think_s=self.settings.think_s,
        )

    @contextlib.contextmanager
    def _told(self, process: Process) -> Iterator[None]:
        """Tell of what ends a connection for good; its user connects again."""
        try:
            yield
        except AsyncKVError as exc:
            if not process.is_gone:
                name = type(exc).__name__
                self.world.tell("note", process.node.name, f"{name}: {exc.message}")
