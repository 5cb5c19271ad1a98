from __future__ import annotations

from hypothesis import given, strategies as st

from asynckv.protocol.limits import Rate


def test_so_many_at_once_and_no_more() -> None:
    rate = Rate(10, 100, 0.0)
    assert rate.spend(100, 0.0)
    assert not rate.spend(1, 0.0)


def test_a_second_adds_as_many_as_may_come_in_one() -> None:
    rate = Rate(10, 100, 0.0)
    assert rate.spend(100, 0.0)
    assert rate.spend(10, 1.0)
    assert rate.spend(5, 1.5)
    assert not rate.spend(6, 2.0)


def test_what_was_not_used_is_not_saved_up() -> None:
    rate = Rate(10, 100, 0.0)
    assert not rate.spend(101, 1000.0)


def test_a_rate_is_worth_a_second_at_least() -> None:
    assert Rate(10, 1, 0.0).spend(10, 0.0)


def test_a_clock_that_goes_back_earns_nothing() -> None:
    rate = Rate(10, 10, 5.0)
    assert rate.spend(10, 5.0)
    assert not rate.spend(1, 4.0)


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0, 1)), max_size=50))
def test_nobody_has_more_than_the_budget(events: list[tuple[int, float]]) -> None:
    rate, now, spent = Rate(10, 100, 0.0), 0.0, 0
    for count, passed in events:
        now += passed
        if not rate.spend(count, now):
            return
        spent += count
        assert spent <= 100 + 10 * now + 1e-6
