from __future__ import annotations

from harness.crashes.marks import Mark, Marks


def test_marks_add_up() -> None:
    marks = Marks()
    marks.add("p-3", Mark.IN)
    marks.add("p-3", Mark.MAY_REPEAT)
    assert marks["p-3"] == Mark.IN | Mark.MAY_REPEAT
    assert not marks["p-2"] and not marks["p-4"] and not marks["q-0"]


def test_entries_are_found_by_their_marks() -> None:
    marks = Marks()
    marks.add("p-0", Mark.IN | Mark.DONE)
    marks.add("q_1-1", Mark.IN)
    assert list(marks.having(Mark.IN)) == ["p-0", "q_1-1"]
    assert list(marks.having(Mark.IN, Mark.DONE)) == ["q_1-1"]
