from __future__ import annotations

from hypothesis import given, strategies as st

from asynckv.links.strangers import Strangers


def test_the_oldest_goes_when_there_is_no_room() -> None:
    strangers = Strangers[int](2)
    assert [strangers.add(number, "host") for number in range(4)] == [None, None, 0, 1]
    assert len(strangers) == 2


def test_who_has_proved_itself_takes_no_place() -> None:
    strangers = Strangers[int](1)
    strangers.add(1, "host")
    strangers.discard(1)
    strangers.discard(1)
    assert strangers.add(2, "host") is None


def test_the_host_that_has_most_gives_way() -> None:
    strangers = Strangers[str](3)
    for name in ("honest", "flood-1", "flood-2"):
        assert strangers.add(name, name.partition("-")[0]) is None
    assert strangers.add("flood-3", "flood") == "flood-1"
    assert strangers.add("honest too", "elsewhere") == "flood-2"


@given(st.lists(st.tuples(st.integers(0, 99), st.sampled_from("abc"))))
def test_there_are_never_too_many_and_the_newest_stays(
    came: list[tuple[int, str]],
) -> None:
    strangers, inside = Strangers[tuple[int, int]](4), set()
    for turn, (number, host) in enumerate(came):
        inside.add((turn, number))
        victim = strangers.add((turn, number), host)
        assert victim != (turn, number)
        if victim is not None:
            inside.remove(victim)
        assert len(strangers) == len(inside) <= 4
