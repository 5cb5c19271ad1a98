from __future__ import annotations

from harness.fuzzing.sides import SIDES


def test_both_ends_of_a_link_are_there_and_all_its_users() -> None:
    assert {side.dials for side in SIDES} == {True, False}
    assert {side.name for side in SIDES} == {
        "serving",
        "asking",
        "listening",
        "dialled",
        "following",
    }
