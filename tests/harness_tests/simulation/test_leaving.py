from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from asynckv.buffers.lookup import LookupBuffer
from harness.simulation.contents import Contents, Wanted
from harness.simulation.history import Call
from harness.simulation.leaving import wrong_departures
from harness.simulation.machines import open_machines
from harness.simulation.nodes import Process
from harness.simulation.scenario import Scenario
from harness.simulation.troubles import Disturbance
from harness.simulation.watch import Life


class Course:
    """One entry with a ttl of 2 s, and what befell it, second by second."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.history = scenario.history
        scenario.settings = dataclasses.replace(scenario.settings, max_hold_s=None)
        self.life = Life(Process(scenario.server, 1), LookupBuffer(), 0.0)
        scenario.watch.lives.append(self.life)
        self.client = Process(scenario.clients[0], 1)
        self.set_ttl(2.0)

    def set_ttl(self, ttl_s: float | None) -> None:
        self.contents = Contents(1, "e1", (1,), None, {}, ttl_s=ttl_s)
        self.history.library.all[:] = [self.contents]

    def commit(self, at: float) -> None:
        self.go_to(at)
        self.life.stays.come("e1")
        self.life.stays.commit("e1")

    def leave(self, at: float, reason: str) -> None:
        self.go_to(at)
        self.life.stays.leave("e1", reason)

    def withdraw(self, at: float) -> None:
        self.go_to(at)
        call = self.history.begin(self.client, "withdraw", self.contents)
        self.history.end(call, "ok", "True")

    def receive(self, at: float, attempt: int = 1) -> Call:
        self.go_to(at)
        wanted = Wanted(self.contents.tokens)
        call = self.history.begin(self.client, "borrow", wanted=wanted)
        self.history.receive(call, self.contents, attempt)
        return call

    def release(self, at: float, call: Call) -> None:
        self.go_to(at)
        self.history.release(call)
        self.history.end(call, "ok")

    def disturb(self, at: float) -> None:
        name = self.client.node.name
        self.scenario.troubles.disturbances.append(Disturbance(name, "cut", at, at))

    def go_to(self, at: float) -> None:
        self.scenario.world.now = at

    def verdict(self) -> str:
        return "; ".join(wrong_departures(self.scenario))


@pytest.fixture
def course() -> Iterator[Course]:
    with open_machines(seed=1) as machines:
        yield Course(Scenario(machines, min_events=1))


@pytest.mark.parametrize(
    ("left", "wrong"),
    [(12.0, ""), (17.0, ""), (11.9, "by its ttl of 2 s after 1.900000 s")],
)
def test_a_ttl_counts_from_the_commit(course: Course, left: float, wrong: str) -> None:
    course.commit(10.0)
    course.leave(left, "ttl")
    assert wrong in course.verdict() if wrong else course.verdict() == ""


def test_what_has_no_ttl_does_not_leave_by_one(course: Course) -> None:
    course.set_ttl(None)
    course.commit(10.0)
    course.leave(800.0, "ttl")
    assert course.verdict() == "e1: left by ttl, and no ttl had begun"


@pytest.mark.parametrize("reason", ["ttl", "withdrawn"])
def test_what_somebody_has_does_not_leave(course: Course, reason: str) -> None:
    course.commit(10.0)
    call = course.receive(11.0)
    course.leave(13.0, reason)
    course.release(14.0, call)
    assert course.verdict() == f"e1: left by {reason!r} out of the hands of call 1"
    course.disturb(10.5)
    assert course.verdict() == ""


def test_what_was_given_back_leaves_at_once_if_its_time_is_over(course: Course) -> None:
    course.commit(10.0)
    course.release(14.0, course.receive(11.0))
    course.leave(14.1, "ttl")
    assert course.verdict() == ""


def test_what_has_left_is_never_delivered(course: Course) -> None:
    course.commit(10.0)
    course.leave(11.0, "withdrawn")
    course.receive(11.5)
    assert course.verdict() == "e1: came to call 1 after it had left"


def test_what_comes_again_may_be_delivered_again(course: Course) -> None:
    course.commit(10.0)
    course.leave(11.0, "withdrawn")
    course.commit(12.0)
    course.receive(12.5)
    assert course.verdict() == ""


def test_what_outlives_its_ttl_is_found_where_nobody_was_frozen(course: Course) -> None:
    course.commit(10.0)
    course.receive(12.5)
    assert course.verdict() == "e1: came to call 1, which began after its ttl"
    course.disturb(11.0)
    assert course.verdict() == ""


def test_a_withdrawal_that_says_true_has_taken_the_entry(course: Course) -> None:
    course.commit(10.0)
    course.withdraw(11.0)
    assert course.verdict() == "e1: call 1 took nothing back"
    course.leave(11.0, "withdrawn")
    assert course.verdict() == ""
