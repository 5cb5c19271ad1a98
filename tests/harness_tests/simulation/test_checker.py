"""The checker can fail: what an entry's course breaks is named, and nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from operator import contains, eq, methodcaller as do

import pytest

from asynckv.buffers.lookup import LookupBuffer
from asynckv.types import TensorSpec
from harness.simulation.checker import judge, wrong_departures
from harness.simulation.contents import Contents, Wanted
from harness.simulation.history import Call, Verb
from harness.simulation.machines import open_machines
from harness.simulation.nodes import Process
from harness.simulation.scenario import Scenario
from harness.simulation.troubles import Disturbance
from harness.simulation.watch import Life

NUMBER = TensorSpec((), "int64")
SMALL = {"extras.number": NUMBER}
LARGE = {**SMALL, "hidden": TensorSpec((2**17,), "uint8")}


class Court:
    """A scenario that was never run, and a history of one entry made up for it."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.history = scenario, scenario.history
        scenario.settings = dataclasses.replace(scenario.settings, max_hold_s=None)
        server = Process(scenario.server, 1)
        server.is_server = True
        life = Life(server, LookupBuffer(), 0.0)
        scenario.watch.lives.append(life)
        self.stays = life.stays
        self.client, self.other = (Process(node, 1) for node in scenario.clients[:2])

    def know(self, *, ttl_s: float | None = 2.0) -> None:
        """An entry with a ttl, and whatever befell it."""
        self._enter(Contents(1, "e1", (1,), None, {}, ttl_s=ttl_s))

    def insert(
        self, *, large: bool = True, deliveries: int = 1, reason: str = ""
    ) -> None:
        """An entry whose insert returned, and why it left."""
        specs = LARGE if large else SMALL
        self._enter(Contents(1, "e1", (1, 2, 1), None, specs, deliveries=deliveries))
        self.call("insert")
        self.scenario.watch.reasons[1] = reason

    def _enter(self, contents: Contents) -> None:
        self.contents = contents
        self.history.library.all[:] = [contents]

    def call(self, verb: Verb, said: str = "") -> None:
        call = self.history.begin(self.client, verb, self.contents)
        self.history.end(call, "ok", said)

    def ask(self, verb: Verb, outcome: str, *, key: tuple[int, ...] = (9,)) -> None:
        """A call that gets nothing, and how it ended."""
        call = self.history.begin(self.other, verb, wanted=Wanted(key))
        self.history.end(call, outcome)

    def get(
        self,
        outcome: str = "ok",
        verb: Verb = "take",
        *,
        attempt: int = 1,
        is_other: bool = False,
    ) -> Call:
        """A delivery of the entry, and how the call ended."""
        call = self.receive(verb, attempt=attempt, is_other=is_other)
        self.history.end(call, outcome)
        return call

    def receive(
        self, verb: Verb = "borrow", *, attempt: int = 1, is_other: bool = False
    ) -> Call:
        process = self.other if is_other else self.client
        wanted = Wanted(self.contents.tokens)
        self.last = self.history.begin(process, verb, wanted=wanted)
        self.history.receive(self.last, self.contents, attempt)
        return self.last

    def release(self) -> None:
        self.history.release(self.last)
        self.history.end(self.last, "ok")

    def lose_link(self) -> None:
        """A take that was cancelled: who made it does not know what it got."""
        wanted = Wanted(self.contents.tokens)
        call = self.history.begin(self.client, "take", wanted=wanted)
        self.history.end(call, "cancelled")

    def blame(self) -> None:
        call = self.history.begin(self.client, "take", wanted=Wanted())
        self.history.blame(call, "the entry has other bytes")

    def come(self, *, is_committed: bool = True) -> None:
        self.stays.come("e1")
        if is_committed:
            self.stays.commit("e1")

    def leave(self, reason: str) -> None:
        self.stays.leave("e1", reason)

    def disturb(self, at: float = 0.0) -> None:
        disturbance = Disturbance(self.client.node.name, "cut", at, at)
        self.scenario.troubles.disturbances.append(disturbance)


@pytest.fixture
def court() -> Iterator[Court]:
    with open_machines(seed=1) as machines:
        yield Court(Scenario(machines, min_events=1))


Course = list[Callable[[Court], object] | str]
"""What happens to an entry, and between it the verdict; "" is right."""

IN = do("insert")
LEFT: Course = [do("come", is_committed=False), do("leave", "withdrawn")]
COURSES: dict[str, Course] = {
    "lost until it was taken": [IN, "lost: e1: 1 of 1, ''", do("get"), ""],
    **{
        f"lost by {reason}": [
            do("insert", reason=reason),
            f"lost: e1: 1 of 1, {reason!r}",
        ]
        for reason in ("producer", "closed", "unknown", "never")
    },
    "withdrawn": [
        do("insert", reason="withdrawn"),
        "lost",
        *LEFT,
        do("call", "withdraw", "True"),
        "",
    ],
    "inserted again in vain": [
        do("insert", reason="producer"),
        do("call", "withdraw", "True"),
        do("come"),
        do("leave", "withdrawn"),
        do("come", is_committed=False),
        do("leave", "producer"),
        "",
    ],
    "inserted again and lost": [
        do("insert", reason="producer"),
        do("call", "withdraw", "True"),
        do("come"),
        do("leave", "withdrawn"),
        do("come"),
        do("leave", "producer"),
        "lost",
    ],
    "taken where the link was lost": [
        IN,
        do("lose_link"),
        "lost",
        do("disturb"),
        "",
    ],
    "a large one that two took": [
        IN,
        do("get"),
        do("get", attempt=2),
        do("disturb"),
        "counted twice: e1 for 1: calls 2, 3",
    ],
    "a small one that came again where the link was lost": [
        do("insert", large=False),
        do("get"),
        do("get", attempt=2, is_other=True),
        "counted twice",
        do("disturb"),
        "",
    ],
    "two deliveries to one": [
        do("insert", deliveries=2),
        do("get"),
        do("get", attempt=2),
        "2 deliveries to client1",
    ],
    "one delivery twice": [
        IN,
        do("get", "ApplicationError", "borrow"),
        do("get"),
        "attempt 1 was delivered 2 times",
    ],
    "other bytes": [do("blame"), "wrong bytes: call 1 take any"],
    **{
        f"{verb} ends by {outcome}": [
            do("ask", verb, outcome),
            f"unexpected: call 1 {verb}",
        ]
        for verb, outcome in (
            ("take", "RuntimeError"),
            ("insert", "AssertionError"),
            ("insert", "EntryConflict"),
            ("take", "PeerLost"),
            ("peek", "TimeoutError"),
            ("borrow", "LeaseLost"),
            ("take", "ChecksumError"),
            ("take", "PeerRestarted"),
            ("take", "BufferClosed"),
        )
    },
}


@pytest.mark.parametrize("course", COURSES.values(), ids=COURSES)
def test_what_is_lost_counted_twice_or_unexpected_is_named(
    court: Court, course: Course
) -> None:
    follow(court, course, judge, contains)


def at(when: float, name: str, *about: str) -> Callable[[Court], object]:
    def step(court: Court) -> None:
        court.scenario.world.now = when
        getattr(court, name)(*about)

    return step


KNOWN: Course = [do("know"), at(10.0, "come")]
RECEIVED: Course = [*KNOWN, at(11.0, "receive")]
DEPARTURES: dict[str, Course] = {
    "by its ttl": [*KNOWN, at(12.0, "leave", "ttl"), ""],
    "long after its ttl": [*KNOWN, at(17.0, "leave", "ttl"), ""],
    "before its ttl": [
        *KNOWN,
        at(11.9, "leave", "ttl"),
        "e1: left by its ttl of 2 s after 1.900000 s",
    ],
    "by a ttl that it has not": [
        do("know", ttl_s=None),
        at(10.0, "come"),
        at(800.0, "leave", "ttl"),
        "e1: left by ttl, and no ttl had begun",
    ],
    **{
        f"out of hands by {reason}": [
            *RECEIVED,
            at(13.0, "leave", reason),
            at(14.0, "release"),
            f"e1: left by {reason!r} out of the hands of call 1",
            do("disturb", 10.5),
            "",
        ]
        for reason in ("ttl", "withdrawn")
    },
    "given back after its ttl": [
        *RECEIVED,
        at(14.0, "release"),
        at(14.1, "leave", "ttl"),
        "",
    ],
    "delivered after it had left": [
        *KNOWN,
        at(11.0, "leave", "withdrawn"),
        at(11.5, "receive"),
        "e1: came to call 1 after it had left",
    ],
    "delivered when it had come again": [
        *KNOWN,
        at(11.0, "leave", "withdrawn"),
        at(12.0, "come"),
        at(12.5, "receive"),
        "",
    ],
    "delivered after its ttl": [
        *KNOWN,
        at(12.5, "receive"),
        "e1: came to call 1, which began after its ttl",
        do("disturb", 11.0),
        "",
    ],
    "taken back in vain": [
        *KNOWN,
        at(11.0, "call", "withdraw", "True"),
        "e1: call 1 took nothing back",
        do("leave", "withdrawn"),
        "",
    ],
}


@pytest.mark.parametrize("course", DEPARTURES.values(), ids=DEPARTURES)
def test_what_leaves_wrongly_is_named(court: Court, course: Course) -> None:
    follow(court, course, wrong_departures, eq)


def follow(
    court: Court,
    course: Course,
    verdict: Callable[[Scenario], Iterable[str]],
    is_verdict: Callable[[str, str], bool],
) -> None:
    for step in course:
        if isinstance(step, str):
            found = "; ".join(verdict(court.scenario))
            assert is_verdict(found, step) and bool(found) == bool(step)
        else:
            step(court)


@pytest.mark.parametrize("reason", ["max_deliver", "withdrawn"])
def test_what_one_holds_may_be_lost_to_it_when_it_failed_at_others(
    court: Court, reason: str
) -> None:
    court.insert(deliveries=2)
    court.get("LeaseLost", "borrow")
    assert "LeaseLost" in "; ".join(judge(court.scenario))
    court.come(is_committed=False)
    court.leave(reason)
    is_explained = "LeaseLost" not in "; ".join(judge(court.scenario))
    assert is_explained == (reason == "max_deliver")


def test_failures_explain_max_deliver_if_there_were_so_many(court: Court) -> None:
    court.insert(reason="max_deliver")
    for attempt in range(1, court.scenario.settings.max_deliver + 1):
        assert "lost" in "; ".join(judge(court.scenario))
        court.get("ApplicationError", "borrow", attempt=attempt)
    assert judge(court.scenario) == []
