"""Judges how entries left: not before their time, not out of hands, and for good.

Virtual time is exact, and so is this: an entry's ttl counts from the tick of its
commit. What a fault may have changed without the application's knowledge, that a
lease is still its own, is not held against anybody.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from harness.simulation.contents import Contents
from harness.simulation.history import Call
from harness.simulation.scenario import Scenario
from harness.simulation.stays import Stay

__all__ = ("wrong_departures",)

_EXACTLY_S: Final = 1e-6
"""Clocks of machines begin anywhere, and sums of floats are not exact."""
_TURNS_S: Final = 0.1
"""So long a server that is not frozen may be busy when a ttl ends."""
_LOST_LINK_S: Final = 60.0
"""A lease may be over so long after the fault that ended it."""


def wrong_departures(scenario: Scenario) -> Iterator[str]:
    """Yield each entry that left, or did not, against what it was promised."""
    inserted = scenario.history.inserted()
    for contents in scenario.history.library.all:
        entry_id = contents.entry_id or inserted.get(contents.number, "")
        stays = [s for life in scenario.watch.lives for s in life.stays.of(entry_id)]
        if not stays:
            continue
        for stay in stays:
            for what in _untimely(scenario, contents, stay):
                yield f"{entry_id}: {what}"
        for what in _late(scenario, contents, stays):
            yield f"{entry_id}: {what}"
    yield from _unfounded(scenario)


def _untimely(scenario: Scenario, contents: Contents, stay: Stay) -> Iterator[str]:
    """One that left too early, or while somebody had it."""
    if stay.reason not in ("ttl", "withdrawn"):
        return
    if stay.reason == "ttl":
        if contents.ttl_s is None or stay.committed is None:
            yield "left by ttl, and no ttl had begun"
        elif stay.left - stay.committed < contents.ttl_s - _EXACTLY_S:
            after_s = stay.left - stay.committed
            yield f"left by its ttl of {contents.ttl_s:g} s after {after_s:.6f} s"
    for call in scenario.history.calls:
        if _held(scenario, call, contents, stay):
            yield f"left by {stay.reason!r} out of the hands of call {call.number}"


def _held(scenario: Scenario, call: Call, contents: Contents, stay: Stay) -> bool:
    """Whether that call certainly had the entry when it left."""
    delivery = call.delivery
    if delivery is None or delivery.contents is not contents:
        return False
    if delivery.let_go_at is None:
        return False  # an await: it had the entry when it was acknowledged
    if not stay.came <= delivery.at < stay.left < delivery.let_go_at:
        return False
    if scenario.settings.max_hold_s is not None:
        return False
    return call.process.is_server or not scenario.troubles.was_disturbed(
        call.node, call.began - _LOST_LINK_S, stay.left
    )


def _late(scenario: Scenario, contents: Contents, stays: list[Stay]) -> Iterator[str]:
    """Deliveries to calls that began when the entry had left, or should have."""
    last = max(stay.left for stay in stays)
    for call in scenario.history.calls:
        if call.delivery is None or call.delivery.contents is not contents:
            continue
        if call.began > last:
            yield f"came to call {call.number} after it had left"
        elif len(stays) == 1 and _is_overdue(scenario, call, contents, stays[0]):
            yield f"came to call {call.number}, which began after its ttl"


def _is_overdue(scenario: Scenario, call: Call, contents: Contents, stay: Stay) -> bool:
    """Whether the ttl was over before the call began, and nobody was frozen.

    Who had the entry then and gave it back ended its stay. One for several
    consumers goes on to others while one of them has it.
    """
    if contents.ttl_s is None or contents.deliveries > 1 or stay.committed is None:
        return False
    if call.began <= stay.committed + contents.ttl_s + _TURNS_S:
        return False
    return not any(
        scenario.troubles.was_disturbed(node.name, stay.committed, call.began)
        for node in scenario.clients
    )


def _unfounded(scenario: Scenario) -> Iterator[str]:
    """Withdrawals that say ``True``, and nothing left by them."""
    for call in scenario.history.calls:
        if call.verb != "withdraw" or call.said != "True" or call.contents is None:
            continue
        ended = call.ended or scenario.world.now
        if not any(
            stay.reason == "withdrawn" and call.began <= stay.left <= ended
            for life in scenario.watch.lives
            for stay in life.stays.of(call.contents.entry_id)
        ):
            yield f"{call.contents.entry_id}: call {call.number} took nothing back"
