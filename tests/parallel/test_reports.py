from __future__ import annotations

from asynckv.parallel.aggregator import Overdue, Reports


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
