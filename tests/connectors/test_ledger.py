from __future__ import annotations

from hypothesis import given, strategies as st

from asynckv.connectors.transfers import Phase, TransferLedger, Way


def test_an_end_is_told_once() -> None:
    ledger = TransferLedger()
    life = ledger.begin("r", "recv")
    assert life is not None
    assert ledger.settle(life)
    assert not ledger.settle(life)
    assert [one.request_id for one in ledger.take_unreported()] == ["r"]
    assert ledger.take_unreported() == []
    assert (ledger.counters.done, ledger.counters.duplicate) == (1, 1)


def test_the_two_directions_of_a_request_are_two_transfers() -> None:
    ledger = TransferLedger()
    assert ledger.begin("r", "recv") and ledger.begin("r", "send")
    assert ledger.begin("r", "recv") is None
    assert len(ledger) == 2


def test_what_was_cancelled_fails_even_if_all_of_it_came() -> None:
    ledger = TransferLedger()
    life = ledger.begin("r", "recv", frozenset({1, 2}))
    assert ledger.cancel("r", "recv") is life
    assert ledger.cancel("r", "recv") is None, "it is stopping already"
    assert life is not None and not life.is_over
    ledger.settle(life)
    (told,) = ledger.take_unreported()
    assert told.reason == "cancelled"
    assert told.block_ids == {1, 2}
    assert told.phase is Phase.TOLD


def test_late_and_unknown_ends_are_counted_apart() -> None:
    ledger = TransferLedger()
    ledger.begin("r", "recv")
    assert ledger.hear("r", "recv") is not None
    ledger.take_unreported()
    assert ledger.hear("r", "recv") is None
    assert ledger.hear("stranger", "recv") is None
    assert ledger.cancel("r", "recv") is None
    assert (ledger.counters.late, ledger.counters.unknown) == (2, 1)


def test_an_id_may_live_again_and_its_first_life_says_nothing_more() -> None:
    ledger = TransferLedger()
    first = ledger.begin("r", "recv")
    assert first is not None
    ledger.settle(first)
    ledger.take_unreported()
    second = ledger.begin("r", "recv")
    assert not ledger.settle(first, "too late")
    assert second is not None and second.phase is Phase.MOVING


def test_only_so_many_ended_ones_are_remembered() -> None:
    ledger = TransferLedger(remembered=2)
    for name in "abc":
        ledger.begin(name, "recv")
        ledger.hear(name, "recv")
    ledger.take_unreported()
    ledger.hear("a", "recv")
    ledger.hear("c", "recv")
    assert (ledger.counters.unknown, ledger.counters.late) == (1, 1)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "hear", "fail", "cancel", "take"]),
        st.sampled_from("ab"),
        st.sampled_from(["send", "recv"]),
    ),
    max_size=40,
)


@given(ACTIONS)
def test_whatever_is_said_each_life_is_told_exactly_once(
    actions: list[tuple[str, str, str]],
) -> None:
    ledger, begun, told = TransferLedger(), 0, 0
    for action, name, way in actions:
        side: Way = "send" if way == "send" else "recv"
        if action == "begin":
            begun += ledger.begin(name, side) is not None
        elif action == "take":
            told += len(ledger.take_unreported())
        elif action == "cancel":
            ledger.cancel(name, side)
        else:
            ledger.hear(name, side, "why" if action == "fail" else "")
    open_ones = len(ledger)
    for name in "ab":
        for way in ("send", "recv"):
            ledger.hear(name, "send" if way == "send" else "recv")
    assert told + len(ledger.take_unreported()) == begun
    assert ledger.counters.done + ledger.counters.failed == begun
    assert open_ones <= 4 and len(ledger) == 0


def test_each_cancelled_transfer_is_counted_once() -> None:
    ledger = TransferLedger()
    for name in "ab":
        ledger.begin(name, "recv")
        for _ in range(2):
            ledger.cancel(name, "recv")
    assert ledger.counters.cancelled == 2
