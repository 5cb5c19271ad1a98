"""What must hold at any time, when all is settled, and when all is closed."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Final

from asynckv import EntryAborted, LookupBuffer, Peer
from harness.simulation.history import History, Verb
from harness.simulation.nodes import Node, Process
from harness.simulation.stays import Stays, WaitingSelects
from harness.simulation.world import World

__all__ = (
    "ANSWERED",
    "ENDING",
    "Life",
    "Watch",
    "where",
)

ANSWERED: Final[frozenset[Verb]] = frozenset({"peek", "withdraw"})
"""Calls that end whatever others do."""
ENDING: Final[frozenset[Verb]] = ANSWERED | {"insert", "write", "taken"}
"""Calls that end when everything was taken."""

_LOOK_S: Final = 0.2
_MATCH_S: Final = 0.5


@dataclasses.dataclass
class Life:
    """One process of the server, and the buffer that lived in it."""

    process: Process
    buffer: LookupBuffer
    begin: float
    end: float = math.inf
    waiting: WaitingSelects = dataclasses.field(init=False)
    stays: Stays = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        world = self.process.node.world
        self.waiting = WaitingSelects(self.buffer)
        self.stays = Stays(self.buffer, lambda: world.now)


class Watch:
    """Looks at buffers, calls and processes, and keeps what is wrong."""

    def __init__(self, world: World, history: History) -> None:
        self.complaints: list[str] = []
        self.lives: list[Life] = []
        self.peers: list[tuple[Process, Peer]] = []
        self._world = world
        self._history = history
        self._missed: dict[str, str] = {}
        self.reasons: dict[int, str] = {}
        """Why the entry of each number left, once nothing is left."""

    def complain(self, what: str) -> None:
        """Something is not as it must be."""
        self._world.tell("WRONG", "", what)
        self.complaints.append(what)

    def look_on(self) -> None:
        """Compare what is held with its bounds, again and again."""
        self._world.call_later(_LOOK_S, self.look_on)
        life = self.lives[-1] if self.lives else None
        if life is not None and not life.process.is_gone:
            with life.process.node.inside():
                now = life.buffer.statistics()
            if not 0 <= now.used_bytes <= now.peak_bytes <= now.max_bytes:
                self.complain(f"out of bounds: {now}")
            if min(now.outside_bytes, now.waiting_inserts, now.waiting_selects) < 0:
                self.complain(f"below nothing: {now}")
        for process, peer in self.peers:
            if process.is_gone:
                continue
            with process.node.inside():
                held = peer.lookup.statistics()
            if not 0 <= held.used_bytes <= held.max_bytes:
                self.complain(f"{process.node.name} out of bounds: {held}")

    def look_at_waits(self, verbs: frozenset[Verb]) -> None:
        """Calls of these kinds have ended by now."""
        for call in self._history.open_calls():
            if call.verb in verbs:
                self.complain(f"hung: call {call} in {where(call.making)}")

    def look_for_matches(self) -> None:
        """Whoever waits for a match waits for something that is not there."""
        self._world.call_later(_MATCH_S, self.look_for_matches)
        life = self.lives[-1] if self.lives else None
        if life is None or life.process.is_gone:
            return
        missed = life.waiting.beside_their_match()
        for query, entry_id in missed.items():
            # Some are told of it a tick later: they have to be found twice.
            if entry_id and self._missed.get(query) == entry_id:
                self.complain(f"hung: {query} waits beside {entry_id}")
        self._missed = missed

    def look_at_rest(self) -> None:
        """Where nothing is left, nothing is charged."""
        life = self.lives[-1]
        with life.process.node.inside():
            self.reasons = {
                number: life.process.loop.finish(_reason(life.buffer, entry_id))
                for number, entry_id in self._history.inserted().items()
            }
        for what in self.charges():
            self.complain(what)

    def charges(self) -> list[str]:
        """Return what is charged, for nothing: who pays may not have heard yet."""
        life, found = self.lives[-1], list[str]()
        with life.process.node.inside():
            now = life.buffer.statistics()
        if now.entries or now.used_bytes or now.outside_bytes or now.leased:
            found.append(f"nothing is left, but {now}")
        busy = {call.process for call in self._history.open_calls() if call.delivery}
        for process, peer in self.peers:
            if process.is_gone or process in busy:
                continue
            with process.node.inside():
                held = peer.lookup.statistics()
            if held.used_bytes:
                found.append(f"{process.node.name} has nothing, but {held}")
        return found

    def look_behind(self, node: Node) -> None:
        """What has closed leaves no task, no socket, no thread."""
        process = node.process
        if process is None:
            return
        for task in asyncio.all_tasks(process.loop):
            self.complain(f"{node.name} left a task: {where(task.get_coro())}")
        if process.files:
            self.complain(f"{node.name} left {len(process.files)} sockets")
        for thread in process.threads:
            self.complain(f"{node.name} left the thread {thread.name}")


async def _reason(buffer: LookupBuffer, entry_id: str) -> str:
    """Say why an entry left: nothing for its last acknowledgement."""
    try:
        await buffer.taken(entry_id)
    except EntryAborted as exc:
        return exc.reason
    except KeyError:
        return "unknown"
    return ""


def where(awaitable: Any) -> str:
    """Name each place on the way to the innermost one that it waits in."""
    return " > ".join(_places(awaitable)) or "nowhere"


def _places(inner: Any) -> Iterator[str]:
    while inner is not None:
        frame = _attribute(inner, "cr_frame", "gi_frame", "ag_frame")
        if frame is not None:
            yield f"{frame.f_code.co_qualname}:{frame.f_lineno}"
        inner = _attribute(inner, "cr_await", "gi_yieldfrom", "ag_await")


def _attribute(thing: Any, *names: str) -> Any:
    for name in names:
        value = getattr(thing, name, None)
        if value is not None:
            return value
    return None
