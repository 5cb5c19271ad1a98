from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Self

import pytest
from hypothesis import given, settings, strategies as st

from asynckv.parallel.aggregator import (
    Ends,
    KVConnectorOutput,
    KVOutputAggregator,
    Overdue,
    Reports,
)


@dataclasses.dataclass
class _Step:
    """A worker's output, as an engine's."""

    rank: int
    kv_connector_output: KVConnectorOutput | None = None


@dataclasses.dataclass
class _Sum:
    value: int

    def aggregate(self, other: Self) -> Self:
        return dataclasses.replace(self, value=self.value + other.value)


class _OtherSum(_Sum):
    """Not of the same type."""


class _Unfoldable(_Sum):
    def aggregate(self, other: Self) -> Self:
        raise RuntimeError("no")


class _Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class _Connector:
    def __init__(self, count: int | None) -> None:
        self._count = count

    def get_finished_count(self) -> int | None:
        return self._count


def _sent(*ids: str, expected: int = 0) -> KVConnectorOutput:
    return KVConnectorOutput(finished_sending={*ids}, expected_finished_count=expected)


def _received(*ids: str, failed: tuple[str, ...] = ()) -> KVConnectorOutput:
    return KVConnectorOutput(
        finished_recving={*ids}, failed_recving={*failed} if failed else None
    )


def _said(
    aggregator: KVOutputAggregator, *said: KVConnectorOutput | None, chosen: int = 0
) -> KVConnectorOutput:
    outputs = [_Step(rank, output) for rank, output in enumerate(said)]
    result = aggregator.aggregate(outputs, chosen)
    assert result is outputs[chosen]
    assert result.kv_connector_output is not None
    return result.kv_connector_output


def test_a_request_is_emitted_when_all_ranks_have_reported_it() -> None:
    aggregator = KVOutputAggregator(2)
    assert _said(aggregator, _sent("a"), _sent("b")).finished_sending is None
    assert _said(aggregator, _sent("b"), None).finished_sending == {"b"}
    assert _said(aggregator, None, _sent("a")).finished_sending == {"a"}
    assert aggregator.unfinished == 0


def test_sending_and_receiving_are_counted_apart() -> None:
    aggregator = KVOutputAggregator(2)
    result = _said(aggregator, _sent("a"), _received("a"))
    assert (result.finished_sending, result.finished_recving) == (None, None)
    result = _said(aggregator, _received("a"), _sent("a"))
    assert result.finished_sending == result.finished_recving == {"a"}


def test_a_rank_that_reports_twice_is_counted_once() -> None:
    aggregator = KVOutputAggregator(2)
    for _ in range(3):
        assert _said(aggregator, _received("a"), None).finished_recving is None
    assert _said(aggregator, None, _received("a")).finished_recving == {"a"}
    assert aggregator.duplicates == 2


def test_a_report_after_completion_changes_nothing() -> None:
    aggregator = KVOutputAggregator(2)
    _said(aggregator, _received("a"), _received("a"))
    assert _said(aggregator, _received("a"), _received("a")).is_empty()
    assert (aggregator.late, aggregator.unfinished) == (2, 0)


def test_a_request_that_is_forgotten_may_come_again() -> None:
    aggregator = KVOutputAggregator(2)
    _said(aggregator, _received("a"), _received("a"))
    aggregator.forget(["a", "unknown"])
    assert _said(aggregator, _received("a"), None).finished_recving is None
    assert _said(aggregator, None, _received("a")).finished_recving == {"a"}


def test_reports_of_some_ranks_are_not_lost_when_their_id_is_used_again() -> None:
    aggregator = KVOutputAggregator(2)
    _said(aggregator, _received("a", failed=("a",)), None)
    aggregator.forget(["a"])  # another request of that id was aborted
    result = _said(aggregator, None, _received("a"))
    assert result.finished_recving == result.failed_recving == {"a"}


def _by(number: int, one: KVConnectorOutput) -> KVConnectorOutput:
    """What a worker of three connectors says if one of them has something to say."""
    parts = [KVConnectorOutput() for _ in range(3)]
    parts[number] = one
    whole = KVConnectorOutput(parts=tuple(parts))
    whole.add_whole(one)
    return whole


def test_ranks_of_one_connector_do_not_complete_a_transfer_of_another() -> None:
    aggregator = KVOutputAggregator(2)
    failed = _received("a", failed=("a",))
    first = _said(aggregator, _by(0, failed), _by(2, _received("a")))
    assert first.is_empty() and aggregator.unfinished == 2
    result = _said(aggregator, _by(2, _received("a")), None)
    assert result.finished_recving == {"a"} and not result.failed_recving
    assert [part.finished_recving for part in result.parts] == [None, None, {"a"}]
    result = _said(aggregator, None, _by(0, failed))
    assert result.parts[0].failed_recving == result.finished_recving == {"a"}
    assert aggregator.duplicates == aggregator.late == 0


def test_what_only_some_ranks_of_a_connector_said_is_overdue() -> None:
    aggregator = KVOutputAggregator(2, deadline_s=0)
    _said(aggregator, _by(1, _received("a")), None)
    (late,) = aggregator.overdue()
    assert (late.direction, late.missing) == ("receiving by connector 1", (1,))


def test_workers_change_how_many_report_new_requests() -> None:
    aggregator = KVOutputAggregator(2)
    assert _said(aggregator, _sent("old"), None).is_empty()
    result = _said(aggregator, _sent("new", expected=1), None)
    assert result.finished_sending == {"new"}
    assert aggregator.expected_finished_count == 1
    assert _said(aggregator, None, _sent("old")).finished_sending == {"old"}


def test_more_reports_than_workers_are_never_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    aggregator = KVOutputAggregator(2)
    result = _said(aggregator, _sent("a", expected=9), _sent("a"))
    assert result.finished_sending == {"a"}
    assert "expects 9 reports of each request; there are 2" in caplog.text


def test_statistics_are_folded_by_their_own_aggregate() -> None:
    said = [
        KVConnectorOutput(kv_connector_stats=_Sum(n), kv_connector_worker_meta=_Sum(-n))
        for n in (1, 2, 4)
    ]
    result = _said(KVOutputAggregator(4), None, *said)
    assert result.kv_connector_stats == _Sum(7)
    assert result.kv_connector_worker_meta == _Sum(-7)
    assert said[0].kv_connector_stats == _Sum(1)


def test_statistics_of_different_types_are_refused_before_anything_is_taken() -> None:
    aggregator = KVOutputAggregator(2)
    one, other = _sent("a"), _sent("a")
    one.kv_connector_stats, other.kv_connector_stats = _Sum(1), _OtherSum(1)
    with pytest.raises(TypeError, match=r"a _Sum, of another a _OtherSum"):
        aggregator.aggregate([_Step(0, one), _Step(1, other)])
    assert aggregator.unfinished == 0


def test_what_ended_outlives_statistics_that_cannot_be_folded() -> None:
    aggregator = KVOutputAggregator(2)
    one, other = _sent("a"), _received("b", failed=("b",))
    one.kv_connector_stats = other.kv_connector_stats = _Unfoldable(1)
    last = KVConnectorOutput(finished_sending={"a"}, invalid_block_ids={3})
    with pytest.raises(RuntimeError, match="no"):
        aggregator.aggregate([_Step(0, one), _Step(1, other), _Step(2, last)])
    result = _said(aggregator, _received("b"), None, None)
    assert result.finished_sending == {"a"}
    assert result.finished_recving == result.failed_recving == {"b"}
    assert result.invalid_block_ids == {3}


def test_invalid_blocks_are_united() -> None:
    result = _said(
        KVOutputAggregator(2),
        KVConnectorOutput(invalid_block_ids={1, 2}),
        KVConnectorOutput(invalid_block_ids={2, 3}),
    )
    assert result.invalid_block_ids == {1, 2, 3}


def test_a_failure_is_held_until_all_ranks_have_finished() -> None:
    aggregator = KVOutputAggregator(2)
    assert _said(aggregator, _received("a", failed=("a",)), None).is_empty()
    assert _said(aggregator, _received("c"), _received("c")).failed_recving is None
    result = _said(aggregator, None, _received("a"))
    assert result.finished_recving == result.failed_recving == {"a"}
    assert _said(aggregator, _received("b"), _received("b")).failed_recving is None


def test_a_failure_of_any_rank_counts_also_where_not_all_are_waited_for() -> None:
    aggregator = KVOutputAggregator(1)
    result = _said(aggregator, _received("a"), _received("a", failed=("a",)))
    assert result.failed_recving == {"a"}
    assert _said(aggregator, None, _received(failed=("a",))).is_empty()
    aggregator.forget(["a"])
    assert _said(aggregator, _received("a"), None).failed_recving is None


def test_a_send_that_one_rank_could_not_finish_has_failed() -> None:
    aggregator = KVOutputAggregator(2)
    one, other = _sent("a", "b"), _sent("b")
    one.failed_sending, one.reasons = {"a"}, {"a": "no room", "b": "not failed"}
    result = _said(aggregator, one, other)
    assert (result.finished_sending, result.failed_sending) == ({"b"}, None)
    assert result.reasons == {}
    result = _said(aggregator, None, _sent("a"))
    assert result.finished_sending == result.failed_sending == {"a"}
    assert result.reasons == {"a": "no room"}
    assert _said(aggregator, None, None).is_empty()


def test_one_rank_without_room_is_enough_for_a_send_to_have_found_none() -> None:
    aggregator = KVOutputAggregator(2)
    one, other = _sent("a", "b"), _sent("b")
    one.failed_sending, other.failed_sending = {"a", "b"}, {"b"}
    one.full_sending = {"a"}
    assert _said(aggregator, one, other).full_sending is None
    assert _said(aggregator, None, _sent("a")).full_sending == {"a"}
    assert _said(aggregator, _sent("a"), _sent("a")).full_sending is None


def test_the_first_reason_of_a_failure_is_kept_until_all_ranks_have_finished() -> None:
    aggregator = KVOutputAggregator(3)
    said = [_received("a", failed=("a",)) for _ in range(3)]
    said[1].reasons, said[2].reasons = {"a": "PeerLost"}, {"a": "TimeoutError"}
    assert _said(aggregator, said[0], said[1], None).is_empty()
    assert _said(aggregator, None, None, said[2]).reasons == {"a": "PeerLost"}
    aggregator.forget(["a"])
    assert _said(aggregator, *[_received("a")] * 3).reasons == {}


def test_failures_that_never_end_are_forgotten_by_themselves() -> None:
    aggregator = KVOutputAggregator(1)
    for number in range(20_000):
        _said(aggregator, _received(failed=(f"r{number}",)))
    assert len(aggregator._ends._failed_recving) == 16 * 1024
    assert _said(aggregator, _received("r19999")).failed_recving == {"r19999"}


def test_the_chosen_ranks_output_carries_the_result() -> None:
    outputs = [_Step(0, _sent("a")), _Step(1, None)]
    assert KVOutputAggregator(1).aggregate(outputs, output_rank=1) is outputs[1]
    assert outputs[1].kv_connector_output == KVConnectorOutput(finished_sending={"a"})


def test_nothing_is_lost_when_the_chosen_rank_has_no_output() -> None:
    aggregator = KVOutputAggregator(1)
    other = _received("a", failed=("a",))
    other.invalid_block_ids, other.kv_connector_stats = {7}, _Sum(1)
    assert aggregator.aggregate([None, _Step(1, other)]) is None
    result = _said(
        aggregator, _sent("b"), KVConnectorOutput(kv_connector_stats=_Sum(2))
    )
    assert result.finished_recving == result.failed_recving == {"a"}
    assert (result.invalid_block_ids, result.finished_sending) == ({7}, {"b"})
    assert result.kv_connector_stats == _Sum(3)
    assert _said(aggregator, None, None).is_empty()


def test_the_ranks_that_are_missing_after_the_deadline_are_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = _Clock()
    aggregator = KVOutputAggregator(4, deadline_s=30.0, clock=clock)
    _said(aggregator, None, _received("a"), None, None)
    clock.now_s = 29.0
    _said(aggregator, _sent("b"), None, None, None)
    assert (aggregator.overdue(), caplog.messages) == ([], [])
    clock.now_s = 31.0
    for _ in range(2):
        _said(aggregator, None, None, None, None)
    assert caplog.messages == [
        "receiving of request 'a' lacks 3 of ranks 0, 2, 3 after 31 s"
    ]
    (late,) = aggregator.overdue()
    assert (late.request_id, late.reported, late.missing) == ("a", (1,), (0, 2, 3))


def test_a_request_past_its_deadline_still_ends_well() -> None:
    clock = _Clock()
    aggregator = KVOutputAggregator(2, deadline_s=1.0, clock=clock)
    _said(aggregator, _sent("a"), None)
    clock.now_s = 99.0
    assert _said(aggregator, None, _sent("a")).finished_sending == {"a"}
    assert aggregator.overdue() == []


@pytest.mark.parametrize(("count", "expected"), [(None, 8), (0, 8), (1, 1), (8, 8)])
def test_the_connector_may_say_how_many_report(
    count: int | None, expected: int
) -> None:
    found = KVOutputAggregator.from_connector(_Connector(count), 8)
    assert found.expected_finished_count == expected


def test_counts_that_can_never_be_reached_are_refused() -> None:
    with pytest.raises(ValueError, match="9 of 8 workers"):
        KVOutputAggregator.from_connector(_Connector(9), 8)
    with pytest.raises(ValueError, match="expected_finished_count is at least 1"):
        KVOutputAggregator(0)
    with pytest.raises(ValueError, match="deadline_s is a number of seconds"):
        KVOutputAggregator(1, deadline_s=math.nan)
    with pytest.raises(TypeError, match="expected_finished_count is a whole number"):
        KVOutputAggregator("2")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="deadline_s is a number of seconds"):
        KVOutputAggregator(1, deadline_s="30")  # type: ignore[arg-type]


_steps = st.lists(
    st.lists(
        st.none() | st.lists(st.sampled_from("abcd"), max_size=3),
        min_size=3,
        max_size=3,
    ),
    max_size=12,
)


@given(_steps, st.lists(st.integers(0, 2), min_size=12, max_size=12))
@settings(deadline=None)
def test_each_request_is_emitted_once_and_only_after_every_rank(
    steps: list[list[list[str] | None]], chosen: list[int]
) -> None:
    aggregator, emitted = KVOutputAggregator(3), Counter[str]()
    reported: dict[str, set[int]] = {}
    for ids, rank in zip(steps, chosen, strict=False):
        outputs = [
            None if some is None else _Step(at, _received(*some))
            for at, some in enumerate(ids)
        ]
        for at, some in enumerate(ids):
            for request_id in some or ():
                reported.setdefault(request_id, set()).add(at)
        result = aggregator.aggregate(outputs, rank)
        kv_output = result and result.kv_connector_output
        emitted.update((kv_output and kv_output.finished_recving) or ())
        assert all(len(reported[request_id]) == 3 for request_id in emitted)
    last = _said(aggregator, None, None, None).finished_recving or set()
    emitted.update(last)
    complete = {request_id for request_id, ranks in reported.items() if len(ranks) == 3}
    assert emitted == Counter(complete)


def received(*names: str) -> KVConnectorOutput:
    return KVConnectorOutput(finished_recving={*names})


def inside(one: KVConnectorOutput, *before: KVConnectorOutput) -> KVConnectorOutput:
    return KVConnectorOutput(parts=(*before, one))


def test_connectors_in_connectors_are_counted_apart_too() -> None:
    ends = Ends(8)
    deep = inside(inside(received("a")))
    ends.take(0, deep, expected=2, now_s=0)
    nothing = ends.take(1, inside(received("a")), expected=2, now_s=0)
    assert not nothing.finished_recving
    ended = ends.take(1, deep, expected=2, now_s=0)
    assert ended.finished_recving == {"a"}
    assert ended.parts[0].parts[0].finished_recving == {"a"}
    assert (ends.unfinished, ends.late, ends.duplicates) == (1, 0, 0)


def test_what_is_complete_is_forgotten_in_each_connector() -> None:
    ends = Ends(8)
    for _ in range(2):
        ended = ends.take(0, inside(received("a")), expected=1, now_s=0)
        assert ended.finished_recving == {"a"}
        ends.forget(["a"])
    assert ends.late == 0


def test_of_what_is_over_only_the_last_are_remembered() -> None:
    ends = Ends(8)
    for number in range(9):
        ends.take(0, received(f"r{number}"), expected=1, now_s=0)
    assert not ends.take(0, received("r8", "r1"), expected=1, now_s=0).finished_recving
    again = ends.take(0, received("r0"), expected=1, now_s=0)
    assert again.finished_recving == {"r0"}


def test_of_failures_without_an_end_only_the_last_are_remembered() -> None:
    ends, names = Ends(8), {f"r{number}" for number in range(9)}
    for name in sorted(names):
        ends.note_failures(KVConnectorOutput(failed_recving={name}))
    ended = ends.take(0, received(*names), expected=1, now_s=0)
    assert ended.failed_recving == names - {"r0"}


@pytest.mark.parametrize(
    "output",
    [
        KVConnectorOutput(finished_sending={"a"}),
        KVConnectorOutput(finished_recving={"a"}),
        KVConnectorOutput(failed_recving={"a"}),
        KVConnectorOutput(invalid_block_ids={0}),
    ],
)
def test_an_output_with_anything_in_it_is_not_empty(output: KVConnectorOutput) -> None:
    assert not output.is_empty()


def test_an_output_without_members_is_empty() -> None:
    assert KVConnectorOutput(
        finished_sending=set(), expected_finished_count=2
    ).is_empty()


def test_ends_are_added_part_by_part() -> None:
    one, other = KVConnectorOutput(), KVConnectorOutput(finished_sending={"a"})
    one.add_ends(KVConnectorOutput(parts=(other,)))
    one.add_ends(KVConnectorOutput(parts=(KVConnectorOutput(), other)))
    assert [part.finished_sending for part in one.parts] == [{"a"}, {"a"}]
    assert one.finished_sending is None


def test_a_request_is_complete_with_its_last_rank() -> None:
    reports = Reports("sending", max_done=8)
    assert not reports.add("a", 0, expected=2, now_s=0)
    assert len(reports) == 1
    assert reports.add("a", 5, expected=9, now_s=0)
    assert len(reports) == 0


def test_what_is_remembered_of_complete_requests_is_bounded() -> None:
    reports = Reports("sending", max_done=2)
    for name in "abc":
        assert reports.add(name, 0, expected=1, now_s=0)
    assert not reports.add("b", 0, expected=1, now_s=0)
    assert reports.add("a", 0, expected=1, now_s=0)
    assert reports.late == 1


def test_only_what_is_past_the_deadline_is_overdue() -> None:
    reports = Reports("sending", max_done=2)
    for now_s, name in enumerate("abc"):
        reports.add(name, now_s, expected=2, now_s=now_s)
    found = list(reports.overdue(world_size=3, now_s=6, deadline_s=5))
    assert found == [
        Overdue("a", "sending", (0,), (1, 2), 1, 6),
        Overdue("b", "sending", (1,), (0, 2), 1, 5),
    ]


def test_only_complete_requests_are_forgotten() -> None:
    reports = Reports("sending", max_done=2)
    reports.add("a", 0, expected=2, now_s=0)
    reports.add("b", 0, expected=1, now_s=0)
    reports.forget(["a", "b", "unknown"])
    assert reports.is_open("a") and not reports.is_done("b")
    assert reports.add("a", 1, expected=2, now_s=0)
