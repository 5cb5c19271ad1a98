"""Virtual time, and whose turn it is.

One thing runs at a time: a step of one node's event loop, a thread of a node up
to where it would wait, or something that the world does (bytes arrive, a fault
begins). Who of those that could run does run is drawn from the seed. When
nobody can, time jumps to whatever comes next.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from harness.simulation.nodes import Process

__all__ = ("COUNTED", "Appointment", "Line", "Runnable", "Spinning", "Story", "World")

COUNTED: Final = frozenset({"bytes", "fault", "call", "end"})
"""Kinds of lines that are events: a slice that was delivered, a fault, a call's
begin, a call's end. The other kinds are remarks."""


class Line(NamedTuple):
    """One line; ``node`` is where it happened, empty for the world itself."""

    at: float
    kind: str
    node: str
    text: str

    def __str__(self) -> str:
        return f"{self.at:12.6f}  {self.kind:<6} {self.node:<8} {self.text}"


class Story:
    """What happened in one run, line by line, in the order in which it did.

    The whole of it is compared when a seed is replayed: nothing enters it that
    differs from process to process.
    """

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.events = 0

    def add(self, at: float, kind: str, node: str, text: str) -> None:
        """Add a line."""
        self.events += kind in COUNTED
        self.lines.append(Line(at, kind, node, text))

    def text(self, *, with_bytes: bool = True) -> Iterator[str]:
        """Yield the lines as text, if wanted without those of single slices."""
        for line in self.lines:
            if with_bytes or line.kind != "bytes":
                yield str(line)

    def digest(self) -> str:
        """Return a short digest of every line: equal for equal runs."""
        whole = "\n".join(self.text()).encode()
        return hashlib.blake2b(whole, digest_size=8).hexdigest()


_STEP_S: Final = 5e-6
"""What a turn costs: virtual time also passes for those who are busy."""

_MAX_IDLE_TURNS: Final = 300_000
"""So many turns without a jump of time, and somebody spins."""


_TURNS_A_LOOK: Final = 16


class Spinning(Exception):
    """Somebody is busy for ever: time does not advance."""


class Runnable(Protocol):
    """A node or a thread, as the world sees it."""

    @property
    def is_runnable(self) -> bool:
        """Whether a turn would do something now."""

    @property
    def wakes_at(self) -> float | None:
        """When it can run even if nothing happens; ``None``: never."""

    def turn(self) -> None:
        """Run a little."""


class Appointment:
    """Something the world will do at a time."""

    __slots__ = ("_args", "_call", "is_cancelled")

    def __init__(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._call = call
        self._args = args
        self.is_cancelled = False

    def cancel(self) -> None:
        """Do not do it."""
        self.is_cancelled = True

    def keep(self) -> None:
        """Do it, unless it was cancelled."""
        if not self.is_cancelled:
            self._call(*self._args)


class World:
    """Time, chance, and everybody who can run."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 0.0
        self.story = Story()
        self.runnables: list[Runnable] = []
        self.current: Process | None = None
        """On whose behalf code runs; ``None``: the world's own."""
        self.members = {threading.get_ident()}
        """The real threads in which its code runs."""
        self._chance = random.Random(f"turns of {seed}")
        self._agenda: list[tuple[float, int, Appointment]] = []
        self._numbers = itertools.count()
        self._idle_turns = 0

    def chance(self, purpose: str) -> random.Random:
        """Return a source of chance that nobody else draws from."""
        return random.Random(f"{purpose} of {self.seed}")

    def tell(self, kind: str, node: str, text: str) -> None:
        """Add a line to the story."""
        self.story.add(self.now, kind, node, text)

    def call_at(
        self, when: float, call: Callable[..., None], *args: Any
    ) -> Appointment:
        """Call ``call(*args)`` at virtual time ``when``, or next if that is past."""
        appointment = Appointment(call, args)
        heapq.heappush(self._agenda, (when, next(self._numbers), appointment))
        return appointment

    def call_later(
        self, delay_s: float, call: Callable[..., None], *args: Any
    ) -> Appointment:
        """As :meth:`call_at`, from now."""
        return self.call_at(self.now + delay_s, call, *args)

    def run(self, until: Callable[[], bool], deadline: float) -> bool:
        """Let things happen until ``until()``; ``False`` if not by ``deadline``.

        Also ``False`` if nothing will ever happen again. Some more may happen
        before that is noticed.

        :raises Spinning: somebody is busy for ever
        """
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        try:
            while not until():
                for _ in range(_TURNS_A_LOOK):
                    if self.now >= deadline or not self._advance(deadline):
                        return until()
            return True
        finally:
            asyncio._set_running_loop(outer)

    def _advance(self, deadline: float) -> bool:
        """Let one thing happen, or time pass; ``False`` at the end of all things."""
        if self._agenda and self._agenda[0][0] <= self.now:
            heapq.heappop(self._agenda)[2].keep()
            return True
        able = [one for one in self.runnables if one.is_runnable]
        if able:
            self._idle_turns += 1
            if self._idle_turns > _MAX_IDLE_TURNS:
                raise Spinning(f"{_MAX_IDLE_TURNS} turns without a pause")
            chosen = able[0] if len(able) == 1 else self._chance.choice(able)
            chosen.turn()
            self.now += _STEP_S
            return True
        return self._jump(deadline)

    def _jump(self, deadline: float) -> bool:
        self._idle_turns = 0
        times = [at for one in self.runnables if (at := one.wakes_at) is not None]
        if self._agenda:
            times.append(self._agenda[0][0])
        if not times:
            return False
        self.now = max(self.now, min(min(times), deadline))
        return True
