from __future__ import annotations

from hypothesis import given, settings, strategies as st

from asynckv.tensors.slots import SlotState, SlotTable


def test_what_was_read_ahead_is_taken_for_who_waits() -> None:
    table, one, other = SlotTable(1), object(), object()
    slot = table.take_ahead(one, 0, 8)
    assert slot is not None and table.take(other, 0, 8) is None
    slot.state = SlotState.FULL
    assert table.take(other, 0, 8) is slot
    assert table.holding(one, 0) is None


def test_nothing_is_read_ahead_while_somebody_waits() -> None:
    table = SlotTable(1)
    table.waiting = 1
    assert table.take_ahead(object(), 0, 8) is None


def test_what_is_lent_or_under_way_is_nobody_elses() -> None:
    table, one = SlotTable(2), object()
    first, second = table.take(one, 0, 8), table.take(one, 8, 16)
    assert first is not None and second is not None
    first.state = SlotState.LENT
    assert table.take(object(), 0, 8) is None
    assert table.lent_to(one) is first and table.moving(one) == 1


def test_what_is_behind_is_free_again() -> None:
    table, one = SlotTable(2), object()
    for start in (0, 8):
        slot = table.take(one, start, start + 8)
        assert slot is not None
        slot.state = SlotState.FULL
    assert table.leave(one, 8) == 1
    assert table.holding(one, 0) is None and table.holding(one, 8) is not None


@settings(deadline=None)
@given(
    slots=st.integers(1, 3), steps=st.lists(st.tuples(st.integers(0, 3), st.booleans()))
)
def test_a_slot_has_one_user_and_a_lost_one_never_another(
    slots: int, steps: list[tuple[int, bool]]
) -> None:
    table, users = SlotTable(slots), [object() for _ in range(4)]
    lost = set()
    for number, is_lost in steps:
        slot = table.take(users[number], 0, 8)
        if slot is None:
            assert all(slot.state is not SlotState.FREE for slot in table.slots)
            break
        assert slot not in lost and slot.user is users[number]
        slot.state = SlotState.LOST if is_lost else SlotState.FULL
        lost |= {slot} if is_lost else set()
