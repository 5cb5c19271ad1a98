"""A slow tier is waited for, a silent one is not, and neither is asked for ever."""

from __future__ import annotations

import dataclasses

import pytest

from asynckv.stores.health import TierCall, TierHealth

MIB = 2**20


@dataclasses.dataclass
class Item:
    """Something on its way."""

    moved_nbytes: int = 0
    is_held: bool = False
    lent_nbytes: int = 0


def watched(health: TierHealth, since_s: float, seconds: float) -> list[TierCall]:
    """Look as often as one should, for so long; return what was late."""
    late = []
    steps = int(seconds / health.tick_s) + 1
    for step in range(1, steps + 1):
        late += health.look(since_s + step * health.tick_s)
    return late


def test_a_call_that_moves_nothing_is_late_after_the_patience() -> None:
    health = TierHealth(0.05)
    call = health.begin([Item()], 0.0)
    assert watched(health, 0.0, 0.04) == []
    assert watched(health, 0.05, 0.03) == [call]
    assert health.is_open


def test_a_call_that_moves_is_never_late_however_long_it_takes() -> None:
    health, item = TierHealth(0.05), Item(lent_nbytes=16 * MIB)
    health.begin([item], 0.0)
    for step in range(1, 1000):
        item.moved_nbytes += MIB // 100
        assert health.look(step * 0.04) == []
    assert not health.is_open


def test_time_in_which_it_waits_for_us_does_not_count() -> None:
    health, item = TierHealth(0.05), Item(is_held=True)
    call = health.begin([item], 0.0)
    assert watched(health, 0.0, 1.0) == []
    item.is_held = False
    assert watched(health, 1.0, 0.1) == [call]


def test_a_call_that_is_left_is_nobody_s_fault() -> None:
    health = TierHealth(0.05)
    call = health.begin([Item()], 0.0)
    health.leave(call)
    health.end(call, 0, 9.0, failed=True)
    assert (health.calls, health.late, health.failed) == (0, 0, 0)


@pytest.mark.parametrize("at_once", [1, 8])
def test_a_healthy_line_of_100_megabit_is_never_too_slow(at_once: int) -> None:
    health, rate, now_s = TierHealth(0.05), 12.5e6, 0.0
    for _ in range(20):  # values of 16 MiB, of which nothing is told until they end
        values = [Item(lent_nbytes=16 * MIB) for _ in range(at_once)]
        calls = [health.begin([value], now_s) for value in values]
        takes_s = at_once * 16 * MIB / rate
        assert watched(health, now_s, takes_s - health.tick_s) == []
        now_s += takes_s
        for call in calls:
            health.end(call, 16 * MIB, now_s, failed=False)
    assert health.rate == pytest.approx(rate, rel=0.9)


def test_a_call_may_wait_for_all_that_was_under_way_when_it_fell_silent() -> None:
    health, rate = TierHealth(0.05), 12.5e6
    health.end(health.begin([Item()], 0.0), 100 * MIB, 100 * MIB / rate, failed=False)
    items = [Item(lent_nbytes=16 * MIB) for _ in range(4)]
    for item in items:
        health.begin([item], 100.0)
    now_s, step_nbytes = 100.0, int(rate * health.tick_s)
    for item in items:  # one after the other, by one connection
        while item.moved_nbytes < item.lent_nbytes:
            now_s += health.tick_s
            item.moved_nbytes += step_nbytes
            assert health.look(now_s) == []


def test_a_line_that_stops_is_late_by_the_rate_that_was_measured() -> None:
    health = TierHealth(0.05)
    health.end(health.begin([Item()], 0.0), 100 * MIB, 0.1, failed=False)
    health.begin([Item(lent_nbytes=10 * MIB)], 1.0)
    assert health.allowed_s() == pytest.approx(0.05 + 2 * 0.01)


def test_time_in_which_our_own_loop_stood_still_does_not_count() -> None:
    health = TierHealth(0.05)
    health.begin([Item()], 0.0)
    assert health.look(10.0) == []
    assert len(watched(health, 10.0, 0.06)) == 1


def test_three_failures_in_a_row_open_the_breaker_and_two_do_not() -> None:
    health = TierHealth(1.0)
    for failed in (True, True, False, True, True):
        health.end(health.begin([Item()], 0.0), 0, 0.1, failed=failed)
    assert not health.is_open
    health.end(health.begin([Item()], 0.0), 0, 0.1, failed=True)
    assert health.is_open


def test_probes_come_less_and_less_often_until_one_call_works() -> None:
    health, waits = TierHealth(1.0), []
    health.open(0.0)
    for _ in range(7):
        waits.append(health.probe_due_s(0.0))
        health.probed(0.0, is_there=False)
    assert waits == [1, 1, 2, 4, 8, 16, 30]
    health.probed(0.0, is_there=True)
    assert health.probe_due_s(0.0) is None
    health.open(0.0)
    assert health.probe_due_s(0.0) == 30
    health.probed(0.0, is_there=True)
    health.worked()
    health.open(0.0)
    assert health.probe_due_s(0.0) == 1


def test_a_call_that_ends_late_changes_nothing_any_more() -> None:
    health = TierHealth(0.05)
    call = health.begin([Item()], 0.0)
    watched(health, 0.0, 0.1)
    health.end(call, MIB, 9.0, failed=False)
    assert (health.calls, health.rate, health.late) == (0, 0.0, 1)


@pytest.mark.parametrize("began_s", [0.0, 0.3, 0.99])
def test_a_call_is_late_when_its_patience_is_over_and_not_a_tick_later(
    began_s: float,
) -> None:
    health, now_s = TierHealth(1.0), 0.0
    other = Item()
    health.begin([other], 0.0)
    call = health.begin([Item()], 0.0) if not began_s else None
    late: list[TierCall] = []
    while call is None or call not in late:
        other.moved_nbytes += 1
        now_s += health.look_in_s()
        if call is None and now_s > began_s:
            call = health.begin([Item()], began_s)
        late += health.look(now_s)
    assert now_s == pytest.approx(began_s + 1.0, abs=0.001)
