from __future__ import annotations

from collections.abc import Iterator

import pytest

from asynckv.buffers.lookup import LookupBuffer
from asynckv.types import TensorSpec
from harness.simulation.checker import judge
from harness.simulation.contents import Contents, Wanted
from harness.simulation.history import Call, Verb
from harness.simulation.machines import open_machines
from harness.simulation.nodes import Process
from harness.simulation.scenario import Scenario
from harness.simulation.troubles import Disturbance
from harness.simulation.watch import Life

LARGE = {
    "extras.number": TensorSpec((), "int64"),
    "hidden": TensorSpec((2**17,), "uint8"),
}
SMALL = {"extras.number": TensorSpec((), "int64")}


class Court:
    """A scenario that was never run, and a history made up for it."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.history = scenario.history
        server = Process(scenario.server, 1)
        server.is_server = True
        scenario.watch.lives.append(Life(server, LookupBuffer(), 0.0))
        self.client = Process(scenario.clients[0], 1)
        self.other = Process(scenario.clients[1], 1)

    def inserted(
        self, *, large: bool = True, deliveries: int = 1, reason: str = ""
    ) -> Contents:
        """An entry whose insert returned, and why it left."""
        number = len(self.history.library.all) + 1
        contents = Contents(
            number,
            f"e{number}",
            (1, 2, number),
            None,
            LARGE if large else SMALL,
            deliveries=deliveries,
        )
        self.history.library.all.append(contents)
        self.call("insert", "ok", contents)
        self.scenario.watch.reasons[number] = reason
        return contents

    def call(
        self, verb: Verb, outcome: str, contents: Contents, said: str = ""
    ) -> Call:
        call = self.history.begin(self.client, verb, contents)
        self.history.end(call, outcome, said)
        return call

    def got(
        self,
        contents: Contents,
        outcome: str = "ok",
        *,
        verb: Verb = "take",
        attempt: int = 1,
        process: Process | None = None,
    ) -> Call:
        """A delivery of that entry, and how the call ended."""
        wanted = Wanted(contents.tokens)
        call = self.history.begin(process or self.client, verb, wanted=wanted)
        self.history.receive(call, contents, attempt)
        self.history.end(call, outcome)
        return call

    def disturb(self) -> None:
        name = self.client.node.name
        self.scenario.troubles.disturbances.append(Disturbance(name, "cut", 0.0, 1.0))

    def verdict(self) -> str:
        return "; ".join(judge(self.scenario))


@pytest.fixture
def court() -> Iterator[Court]:
    with open_machines(seed=1) as machines:
        yield Court(Scenario(machines, min_events=1))


def test_an_entry_that_was_taken_once_is_right(court: Court) -> None:
    court.got(court.inserted())
    assert court.verdict() == ""


def test_an_entry_that_nobody_got_is_lost(court: Court) -> None:
    court.inserted()
    assert court.verdict() == "lost: e1: 1 of 1, ''"


@pytest.mark.parametrize("reason", ["producer", "closed", "unknown", "never"])
def test_an_entry_that_left_for_no_named_reason_is_lost(
    court: Court, reason: str
) -> None:
    court.inserted(reason=reason)
    assert "lost" in court.verdict()


def test_a_withdrawal_explains_what_left_by_it_and_nothing_else_does(
    court: Court,
) -> None:
    contents = court.inserted(reason="withdrawn")
    assert "lost" in court.verdict()
    stays = court.scenario.watch.lives[-1].stays
    stays.come(contents.entry_id)
    stays.leave(contents.entry_id, "withdrawn")
    court.call("withdraw", "ok", contents, "True")
    assert court.verdict() == ""


@pytest.mark.parametrize("is_committed", [False, True])
def test_what_is_inserted_again_in_vain_is_lost_only_if_it_was_in_again(
    court: Court, *, is_committed: bool
) -> None:
    contents = court.inserted(reason="producer")
    court.call("withdraw", "ok", contents, "True")
    stays = court.scenario.watch.lives[-1].stays
    for reason in ("withdrawn", "producer"):
        stays.come(contents.entry_id)
        if reason == "withdrawn" or is_committed:
            stays.commit(contents.entry_id)
        stays.leave(contents.entry_id, reason)
    assert ("lost" in court.verdict()) == is_committed


@pytest.mark.parametrize("reason", ["max_deliver", "withdrawn"])
def test_what_one_holds_may_be_lost_to_it_when_it_failed_at_others(
    court: Court, reason: str
) -> None:
    contents = court.inserted(deliveries=2)
    call = court.got(contents, "LeaseLost", verb="borrow")
    assert "LeaseLost" in court.verdict()
    stays = court.scenario.watch.lives[-1].stays
    stays.come(contents.entry_id)
    stays.leave(contents.entry_id, reason)
    assert call.began <= stays.of(contents.entry_id)[0].left
    assert ("LeaseLost" in court.verdict()) == (reason == "withdrawn")


def test_failures_explain_max_deliver_if_there_were_so_many(court: Court) -> None:
    contents = court.inserted(reason="max_deliver")
    most = court.scenario.settings.max_deliver
    for attempt in range(1, most + 1):
        assert "lost" in court.verdict()
        court.got(contents, "ApplicationError", verb="borrow", attempt=attempt)
    assert court.verdict() == ""


def test_a_consumer_that_lost_its_link_may_have_taken_the_entry_along(
    court: Court,
) -> None:
    contents = court.inserted()
    call = court.history.begin(court.client, "take", wanted=Wanted(contents.tokens))
    court.history.end(call, "cancelled")
    assert "lost" in court.verdict()
    court.disturb()
    assert court.verdict() == ""


def test_a_large_entry_that_two_took_counted_twice(court: Court) -> None:
    contents = court.inserted()
    court.got(contents)
    court.got(contents, attempt=2)
    court.disturb()
    assert "counted twice: e1 for 1: calls 2, 3" in court.verdict()


def test_a_small_one_may_come_again_where_its_link_was_lost(court: Court) -> None:
    contents = court.inserted(large=False)
    court.got(contents)
    court.got(contents, attempt=2, process=court.other)
    assert "counted twice" in court.verdict()
    court.disturb()
    assert court.verdict() == ""


def test_deliveries_go_to_different_consumers(court: Court) -> None:
    contents = court.inserted(deliveries=2)
    court.got(contents)
    court.got(contents, attempt=2)
    assert "2 deliveries to client1" in court.verdict()


def test_each_delivery_has_a_number_of_its_own(court: Court) -> None:
    contents = court.inserted()
    court.got(contents, "ApplicationError", verb="borrow")
    court.got(contents)
    assert "attempt 1 was delivered 2 times" in court.verdict()


@pytest.mark.parametrize(
    ("verb", "outcome"),
    [
        ("take", "RuntimeError"),
        ("insert", "AssertionError"),
        ("insert", "EntryConflict"),
        ("take", "PeerLost"),
        ("peek", "TimeoutError"),
        ("borrow", "LeaseLost"),
        ("take", "ChecksumError"),
        ("take", "PeerRestarted"),
        ("take", "BufferClosed"),
    ],
)
def test_an_end_that_nothing_explains_is_unexpected(
    court: Court, verb: Verb, outcome: str
) -> None:
    call = court.history.begin(court.other, verb, wanted=Wanted((9,)))
    court.history.end(call, outcome)
    if court.scenario.settings.max_hold_s is None or outcome != "LeaseLost":
        assert f"unexpected: call 1 {verb}" in court.verdict()


def test_what_was_seen_at_once_is_in_the_verdict(court: Court) -> None:
    call = court.history.begin(court.client, "take", wanted=Wanted())
    court.history.blame(call, "the entry has other bytes")
    assert court.verdict().startswith("wrong bytes: call 1 take any")
