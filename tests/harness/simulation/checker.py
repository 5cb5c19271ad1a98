"""Judges a history by the five promises: what was lost, what counted twice, what hung.

Wrong bytes are noticed when they are handed out; the rest is decided here, from
what the applications saw and from the final state. Where the promise itself has
an exception, the checker allows no more than that.

So are the departures of entries: not before their time, not out of hands, and for
good. Virtual time is exact, and so is this: an entry's ttl counts from the tick of its
commit. What a fault may have changed without the application's knowledge, that a
lease is still its own, is not held against anybody.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Final

from harness.simulation.contents import Contents
from harness.simulation.history import Call, Verb
from harness.simulation.scenario import Scenario
from harness.simulation.stays import Stay
from harness.simulation.watch import Life

__all__ = (
    "judge",
    "wrong_departures",
)

_ROUND_TRIP_S: Final = 30.0
"""A link that is lost so soon after a small entry was taken may have lost the
acknowledgement with it."""

_AT_ONCE_S: Final = 0.01

_ALWAYS: Final = {"ok", "cancelled", "crashed"}
_SELECTS: Final[frozenset[Verb]] = frozenset({"take", "borrow", "read"})
_INSERTS: Final[frozenset[Verb]] = frozenset({"insert", "write"})


def judge(scenario: Scenario) -> list[str]:
    """Return every broken promise, in words; none if all were kept."""
    return [
        *(f"wrong bytes: {what}" for what in scenario.history.wrong),
        *(f"unexpected: {what}" for what in _unexpected(scenario)),
        *(f"lost: {what}" for what in _lost(scenario)),
        *(f"left wrongly: {what}" for what in wrong_departures(scenario)),
        *(f"counted twice: {what}" for what in _twice(scenario)),
    ]


def _unexpected(scenario: Scenario) -> Iterator[str]:
    """Ends of calls that nothing explains."""
    for call in scenario.history.calls:
        if call.is_open or call.outcome in _ALWAYS:
            continue
        if not _may_fail(scenario, call):
            yield f"call {call}: {call.outcome}, {call.said}"


def _may_fail(scenario: Scenario, call: Call) -> bool:
    ended = call.ended or scenario.world.now
    disturbed = _was_disturbed(scenario, call)
    # A server that lost its power is missed a while later.
    restarted = any(
        call.began - _ROUND_TRIP_S <= life.end <= ended for life in scenario.watch.lives
    )
    flipped = bool(scenario.troubles.kinds.get("flip"))
    closing = ended >= scenario.closing_at
    match call.outcome:
        case "ApplicationError":
            return call.verb in ("write", "borrow", "read")
        case "KeyError":
            return call.verb == "taken"
        case "EntryAborted":
            may_abort = call.verb in ("insert", "write", "read", "taken")
            return may_abort or _was_taken(scenario, call)
        case "EntryConflict":
            return call.verb in _INSERTS and _is_repeated(scenario, call)
        case "EntryTooLarge":
            return _is_too_large(scenario, call)
        case "LeaseLost":
            held = scenario.settings.max_hold_s is not None
            failed = call.verb == "read" and _has_failed_writer(scenario, call)
            given_up = _was_given_up(scenario, call)
            known = held or disturbed or closing or failed or given_up
            return call.verb in ("borrow", "read") and known
        case "ChecksumError":
            return flipped and disturbed
        case "PeerLost":
            return disturbed or closing or _was_broken_for_memory(scenario, call)
        case "PeerRestarted":
            return restarted
        case "TimeoutError":
            return disturbed
        case "BufferClosed":
            return closing
    return False


def _was_broken_for_memory(scenario: Scenario, call: Call) -> bool:
    """Whether its link was broken so that a cancelled call's memory was quiet.

    That is the promise where a lane does not let go of it within a second.
    """
    return call.said.endswith("did not let go of memory in time") and any(
        other.process is call.process
        and other.outcome == "cancelled"
        and abs((other.ended or 0) - (call.ended or 0)) < _AT_ONCE_S
        for other in scenario.history.calls
    )


def _was_taken(scenario: Scenario, call: Call) -> bool:
    """Whether it asked for an entry by its id that had been acknowledged by then."""
    entry_id = call.wanted.entry_id if call.wanted is not None else None
    if entry_id is None:
        return False
    ended = call.ended or scenario.world.now
    stays = [s for life in scenario.watch.lives for s in life.stays.of(entry_id)]
    return any(not stay.reason and stay.left <= ended for stay in stays)


def _was_given_up(scenario: Scenario, call: Call) -> bool:
    """Whether what it held failed meanwhile at others, once more than it may."""
    if call.delivery is None or call.delivery.contents.deliveries < 2:
        return False
    ended = call.ended or scenario.world.now
    return any(
        stay.reason == "max_deliver" and call.began <= stay.left <= ended
        for life in scenario.watch.lives
        for stay in _stays_of(scenario, call.delivery.contents, life)
    )


def _stays_of(scenario: Scenario, contents: Contents, life: Life) -> Sequence[Stay]:
    entry_id = scenario.history.inserted().get(contents.number, contents.entry_id)
    return life.stays.of(entry_id) if entry_id else ()


def _has_failed_writer(scenario: Scenario, call: Call) -> bool:
    """Whether what it read was never whole."""
    contents = call.delivery.contents if call.delivery is not None else None
    return any(
        other.verb == "write" and other.contents is contents and other.outcome != "ok"
        for other in scenario.history.calls
    )


def _is_repeated(scenario: Scenario, call: Call) -> bool:
    same = [c for c in scenario.history.calls if c.contents is call.contents]
    return sum(c.verb in _INSERTS for c in same) > 1


def _is_too_large(scenario: Scenario, call: Call) -> bool:
    settings = scenario.settings
    if call.contents is not None:
        return call.contents.nbytes > settings.max_bytes
    if call.process.is_server:
        return False
    largest = max((c.nbytes for c in scenario.history.library.all), default=0)
    return largest > settings.receive_bytes


def _lost(scenario: Scenario) -> Iterator[str]:
    """Inserts that returned, and whose entry nobody got the promised times."""
    got = _deliveries(scenario)
    for contents in scenario.history.library.all:
        inserts = [
            call
            for call in scenario.history.calls
            if call.contents is contents and call.verb in _INSERTS
        ]
        if not any(_is_certain(scenario, call) for call in inserts):
            continue
        reason = _reason_of(scenario, contents)
        calls = got[contents.number]
        missing = contents.deliveries - sum(call.outcome == "ok" for call in calls)
        if not _may_leave(scenario, contents, reason, missing):
            yield f"{_name(contents)}: {missing} of {contents.deliveries}, {reason!r}"


def _reason_of(scenario: Scenario, contents: Contents) -> str:
    """Why it left for good: one that was inserted again in vain had left before."""
    reason = scenario.watch.reasons.get(contents.number, "never")
    if reason == "producer":
        for stay in reversed(_stays_of(scenario, contents, scenario.watch.lives[-1])):
            if stay.committed is not None or stay.reason != "producer":
                return stay.reason
    return reason


def _may_leave(
    scenario: Scenario, contents: Contents, reason: str, missing: int
) -> bool:
    """Whether what applications did explains that the entry left so."""
    selects = [c for c in scenario.history.calls if c.verb in _SELECTS]
    match reason:
        case "":
            doubtful = sum(_is_doubtful(scenario, c, contents) for c in selects)
            return missing <= doubtful
        case "ttl":
            return contents.ttl_s is not None
        case "withdrawn":
            return _was_withdrawn(scenario, contents)
        case "max_deliver":
            failed = sum(_may_have_failed(c, contents) for c in selects)
            return failed >= scenario.settings.max_deliver
    return False


def _is_certain(scenario: Scenario, insert: Call) -> bool:
    """Whether the insert returned, to a buffer that lived to the end."""
    return insert.outcome == "ok" and insert.began >= scenario.watch.lives[-1].begin


def _was_withdrawn(scenario: Scenario, contents: Contents) -> bool:
    # Sent again after its answer was lost, it says of what it has done: not there.
    return any(
        call.contents is contents
        and call.verb == "withdraw"
        and (call.said != "False" or _was_disturbed(scenario, call))
        for call in scenario.history.calls
    )


def _was_disturbed(scenario: Scenario, call: Call) -> bool:
    ended = call.ended or scenario.world.now
    return not call.process.is_server and scenario.troubles.was_disturbed(
        call.node, call.began - 60, ended
    )


def _may_have_failed(call: Call, contents: Contents) -> bool:
    """Whether the application may have had the entry, and not to a good end."""
    if call.outcome == "ok" or call.wanted is None:
        return False
    if call.delivery is not None:
        return call.delivery.contents is contents
    return call.verb == "read" and call.wanted.matched(contents) is not None


def _is_doubtful(scenario: Scenario, call: Call, contents: Contents) -> bool:
    """Whether the call may have acknowledged that entry without saying so.

    At-most-once: a consumer that dies, loses its link or is cancelled in the
    moment of an acknowledgement may have taken the entry with it.
    """
    if call.process.is_server or call.outcome == "ok" or call.wanted is None:
        return False
    if call.delivery is not None:
        if call.delivery.contents is not contents:
            return False
        if call.delivery.was_used:
            return True  # it left its body, and never heard the answer
    if call.wanted.matched(contents) is None:
        return False
    ended = call.ended or scenario.world.now
    return call.outcome == "crashed" or scenario.troubles.was_disturbed(
        call.node, call.began, ended
    )


def _twice(scenario: Scenario) -> Iterator[str]:
    """Entries that counted more often than they were inserted for."""
    for number, calls in sorted(_deliveries(scenario).items()):
        contents = scenario.history.library.all[number - 1]
        for life in scenario.watch.lives:
            mine = [call for call in calls if _is_of(call, life)]
            yield from _too_often(scenario, contents, mine)
            if not _new_lives(scenario, contents):
                yield from _same_attempt(contents, mine)


def _too_often(
    scenario: Scenario, contents: Contents, calls: list[Call]
) -> Iterator[str]:
    counted = [call for call in calls if call.outcome == "ok"]
    sure = [call for call in counted if not _may_repeat(scenario, call, contents)]
    lives = 1 + _new_lives(scenario, contents)
    if len(sure) > contents.deliveries * lives:
        numbers = ", ".join(str(call.number) for call in counted)
        yield f"{_name(contents)} for {contents.deliveries}: calls {numbers}"
    if contents.deliveries > 1 and lives == 1:
        consumers = collections.Counter(call.consumer for call in sure)
        for consumer, count in consumers.items():
            if count > 1:
                yield f"{_name(contents)}: {count} deliveries to {consumer}"


def _may_repeat(scenario: Scenario, call: Call, contents: Contents) -> bool:
    """Whether its acknowledgement may have been lost: small, awaited, and cut."""
    if call.verb != "take" or not contents.is_small or call.process.is_server:
        return False
    ended = call.ended or scenario.world.now
    return scenario.troubles.was_disturbed(call.node, ended, ended + _ROUND_TRIP_S)


def _new_lives(scenario: Scenario, contents: Contents) -> int:
    """How often the entry may have come in again after it had left otherwise."""
    inserts = sum(
        call.contents is contents and call.verb in _INSERTS
        for call in scenario.history.calls
    )
    return max(0, inserts - 1)


def _same_attempt(contents: Contents, calls: list[Call]) -> Iterator[str]:
    """Deliveries of one entry are numbered, each its own number."""
    seen = collections.Counter(
        call.delivery.attempt for call in calls if call.delivery is not None
    )
    for attempt, count in seen.items():
        if count > 1:
            yield f"{_name(contents)}: attempt {attempt} was delivered {count} times"


def _deliveries(scenario: Scenario) -> dict[int, list[Call]]:
    """Return the calls that got each entry, by its number."""
    got: dict[int, list[Call]] = collections.defaultdict(list)
    for call in scenario.history.calls:
        if call.delivery is not None:
            got[call.delivery.contents.number].append(call)
    return got


def _is_of(call: Call, life: Life) -> bool:
    at = call.delivery.at if call.delivery is not None else call.began
    return life.begin <= at <= life.end


def _name(contents: Contents) -> str:
    return contents.entry_id or f"number {contents.number}"


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
