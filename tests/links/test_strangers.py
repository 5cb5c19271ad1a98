from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, strategies as st

from asynckv.links.reception import Strangers

HOSTS = ("", "10.0.0.1", "10.0.0.2", "10.0.1.1", "fd00::1", "fd00:0:0:1::1")


def filled(hosts: Iterable[str], *, places: int) -> Strangers[tuple[str, int]]:
    """One of each; they are called by their host and a number."""
    strangers = Strangers[tuple[str, int]](places)
    for number, host in enumerate(hosts):
        assert strangers.add((host, number), host) is None
    return strangers


def test_one_goes_when_there_is_no_room() -> None:
    strangers = filled(["10.0.0.1", "10.0.0.1"], places=2)
    victim = strangers.add(("new", 0), "10.0.0.1")
    assert victim in {("10.0.0.1", 0), ("10.0.0.1", 1)}
    assert len(strangers) == 2


def test_who_has_proved_itself_takes_no_place() -> None:
    strangers = Strangers[int](1)
    strangers.add(1, "10.0.0.1")
    strangers.discard(1)
    strangers.discard(1)
    assert strangers.add(2, "10.0.0.1") is None


@pytest.mark.parametrize(
    ("honest", "flood"),
    [
        ("10.0.0.1", ["10.0.0.2"]),
        ("", ["10.0.0.2"]),
        ("10.0.0.1", [f"10.0.1.{number}" for number in range(250)]),
        ("fd00::1", [f"fd00:0:0:1::{number}" for number in range(250)]),
    ],
    ids=["another host", "this host", "a network", "an IPv6 network"],
)
def test_a_flood_takes_no_place_of_another_host_or_network(
    honest: str, flood: list[str]
) -> None:
    strangers = filled([honest, *flood[:1] * 3], places=4)
    for number in range(250):
        strangers.add(("flood", number), flood[number % len(flood)])
    strangers.add(("honest too", 0), honest)
    assert {(honest, 0), ("honest too", 0)} <= set(strangers._origins)


def test_a_flood_from_everywhere_leaves_a_place_to_chance() -> None:
    """Were it the oldest that goes, nobody would last for 64 others."""
    stayed = 0
    for _ in range(100):
        strangers = filled([f"10.0.{number}.1" for number in range(64)], places=64)
        for number in range(64):
            strangers.add(("flood", number), f"10.1.{number}.1")
        stayed += ("10.0.0.1", 0) in strangers._origins
    assert 7 < stayed < 65  # 36 are expected, and 6 standard deviations are 29


def test_who_says_nothing_goes_first_wherever_it_is() -> None:
    strangers = filled([f"10.0.0.{number}" for number in range(8)], places=64)
    for number in range(8):
        strangers.note_heard((f"10.0.0.{number}", number))
    for number in range(200):
        strangers.add(("flood", number), f"10.1.{number}.1")
    assert {(f"10.0.0.{number}", number) for number in range(8)} <= set(
        strangers._origins
    )


def test_who_was_not_listened_to_yet_is_not_silent() -> None:
    spoken = {("10.0.0.1", 0), ("10.0.1.1", 1)}
    strangers = Strangers[tuple[str, int]](3, spoken.__contains__)
    for number in range(3):
        host = f"10.0.{number}.1"
        strangers.add((host, number), host)
    for number in range(20):
        victim = strangers.add(("flood", number), f"10.1.{number}.1")
        assert victim not in spoken


@given(st.lists(st.tuples(st.integers(0, 99), st.sampled_from(HOSTS))))
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
        if number % 2:
            strangers.note_heard((turn, number))
