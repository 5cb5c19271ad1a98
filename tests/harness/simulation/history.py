"""Every call that simulated applications made: when, what of, and how it ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Coroutine
from typing import Any, Literal, TypeAlias

from harness.simulation.contents import Contents, Library, Wanted
from harness.simulation.nodes import Process

__all__ = ("Call", "Delivery", "History", "Verb")

Verb: TypeAlias = Literal[
    "insert", "write", "take", "borrow", "read", "peek", "taken", "withdraw"
]
"""``write`` is ``open_insert``, ``read`` is ``open_drop_select``; ``take`` awaits a
``drop_select`` and ``borrow`` enters one."""


@dataclasses.dataclass(eq=False)
class Delivery:
    """An entry in the hands of an application."""

    contents: Contents
    attempt: int
    at: float
    was_used: bool = False
    """The application was through with it: it took it, or left its body cleanly."""
    let_go_at: float | None = None
    """When its body was left, in whatever way; until then it was in its hands."""


@dataclasses.dataclass(eq=False)
class Call:
    """One call. ``outcome`` is empty while it is under way.

    Then ``ok``, ``cancelled``, ``crashed`` (its process did), or the name of
    the exception.
    """

    number: int
    verb: Verb
    process: Process
    began: float
    contents: Contents | None = None
    wanted: Wanted | None = None
    ended: float | None = None
    outcome: str = ""
    said: str = ""
    """What the outcome came with: a result, an exception's text."""
    delivery: Delivery | None = None
    making: Coroutine[Any, Any, None] | None = None
    has_begun: bool = False
    """Whether its code ran at all before it was cancelled."""
    is_blamed: bool = False

    @property
    def node(self) -> str:
        """The node it was made on."""
        return self.process.node.name

    @property
    def consumer(self) -> str:
        """Who this is to the buffer: a peer, or a local call of its own."""
        if self.process.is_server:
            return f"{self.node} call {self.number}"
        return self.node

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return not self.outcome

    def __str__(self) -> str:
        if self.contents is not None:
            contents = self.contents
            name = contents.entry_id or f"number {contents.number}"
            what = f"{name} {list(contents.tokens)} {contents.nbytes} bytes"
            if contents.deliveries > 1:
                what += f" for {contents.deliveries}"
        else:
            what = str(self.wanted)
        return f"{self.number} {self.verb} {what}"


class History:
    """The calls in the order in which they began, and what is already wrong."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._open: list[Call] = []
        self.library = Library()
        self.wrong: list[str] = []
        """What was seen to break a promise the moment it happened."""

    def begin(
        self,
        process: Process,
        verb: Verb,
        contents: Contents | None = None,
        wanted: Wanted | None = None,
    ) -> Call:
        """A call begins."""
        world = process.node.world
        number = len(self.calls) + 1
        call = Call(number, verb, process, world.now, contents, wanted)
        self.calls.append(call)
        self._open = [*self.open_calls(), call]
        world.tell("call", process.node.name, str(call))
        return call

    def end(self, call: Call, outcome: str, said: str = "") -> None:
        """A call has ended. Nothing is heard of a process that is gone."""
        if call.process.is_gone or not call.is_open:
            return
        world = call.process.node.world
        call.ended, call.outcome, call.said = world.now, outcome, said
        took_s = world.now - call.began
        text = f"{call.number} {call.verb}: {outcome}{said and f', {said}'}"
        world.tell("end", call.node, f"{text} after {took_s:.3f} s")

    def crash(self, process: Process) -> None:
        """That process is gone, and its calls with it."""
        for call in self.calls:
            if call.process is process and call.is_open:
                call.ended, call.outcome = process.node.world.now, "crashed"

    def receive(self, call: Call, contents: Contents, attempt: int) -> None:
        """An application has an entry."""
        if call.process.is_gone:
            return
        world = call.process.node.world
        call.delivery = Delivery(contents, attempt, world.now)
        name = contents.entry_id or f"number {contents.number}"
        text = f"{call.number} {call.verb} has {name}, attempt {attempt}"
        world.tell("has", call.node, text)

    def use(self, call: Call) -> None:
        """The application is through with its delivery, which now counts."""
        if call.delivery is not None and not call.process.is_gone:
            call.delivery.was_used = True

    def release(self, call: Call) -> None:
        """The application's body is left; what it had may be given to others now."""
        if call.delivery is not None and not call.process.is_gone:
            call.delivery.let_go_at = call.process.node.world.now

    def blame(self, call: Call, what: str) -> None:
        """A promise is broken."""
        if not call.process.is_gone:
            call.process.node.world.tell("WRONG", call.node, f"{call.number} {what}")
            self.wrong.append(f"call {call}: {what}")

    def open_calls(self) -> list[Call]:
        """Return the calls that are under way."""
        return [call for call in self._open if call.is_open]

    def inserted(self) -> dict[int, str]:
        """Return the ids of entries whose insert returned, by their numbers."""
        return {
            call.contents.number: call.contents.entry_id or call.said
            for call in self.calls
            if call.outcome == "ok" and call.contents is not None
            if call.verb in ("insert", "write")
        }
