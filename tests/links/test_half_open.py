from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, strategies as st

from asynckv.links.acceptor import HalfOpen

HOSTS = ("", "10.0.0.1", "10.0.0.2", "10.0.1.1", "fd00::1", "fd00:0:0:1::1")


def filled(hosts: Iterable[str], *, places: int) -> HalfOpen[tuple[str, int]]:
    """One of each; they are called by their host and a number."""
    half_open = HalfOpen[tuple[str, int]](places)
    for number, host in enumerate(hosts):
        assert half_open.add((host, number), host) is None
    return half_open


def test_one_goes_when_there_is_no_room() -> None:
    half_open = filled(["10.0.0.1", "10.0.0.1"], places=2)
    victim = half_open.add(("new", 0), "10.0.0.1")
    assert victim in {("10.0.0.1", 0), ("10.0.0.1", 1)}
    assert len(half_open) == 2


def test_who_has_proved_itself_takes_no_place() -> None:
    half_open = HalfOpen[int](1)
    half_open.add(1, "10.0.0.1")
    half_open.discard(1)
    half_open.discard(1)
    assert half_open.add(2, "10.0.0.1") is None


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
    half_open = filled([honest, *flood[:1] * 3], places=4)
    for number in range(250):
        half_open.add(("flood", number), flood[number % len(flood)])
    half_open.add(("honest too", 0), honest)
    assert {(honest, 0), ("honest too", 0)} <= set(half_open._origins)


def test_a_flood_from_everywhere_leaves_a_place_to_chance() -> None:
    """Were it the oldest that goes, nobody would last for 64 others."""
    stayed = 0
    for _ in range(100):
        half_open = filled([f"10.0.{number}.1" for number in range(64)], places=64)
        for number in range(64):
            half_open.add(("flood", number), f"10.1.{number}.1")
        stayed += ("10.0.0.1", 0) in half_open._origins
    assert 7 < stayed < 65  # 36 are expected, and 6 standard deviations are 29


def test_who_says_nothing_goes_first_wherever_it_is() -> None:
    half_open = filled([f"10.0.0.{number}" for number in range(8)], places=64)
    for number in range(8):
        half_open.note_spoken((f"10.0.0.{number}", number))
    for number in range(200):
        half_open.add(("flood", number), f"10.1.{number}.1")
    assert {(f"10.0.0.{number}", number) for number in range(8)} <= set(
        half_open._origins
    )


def test_who_was_not_listened_to_yet_is_not_silent() -> None:
    spoken = {("10.0.0.1", 0), ("10.0.1.1", 1)}
    half_open = HalfOpen[tuple[str, int]](3, spoken.__contains__)
    for number in range(3):
        host = f"10.0.{number}.1"
        half_open.add((host, number), host)
    for number in range(20):
        victim = half_open.add(("flood", number), f"10.1.{number}.1")
        assert victim not in spoken


@given(st.lists(st.tuples(st.integers(0, 99), st.sampled_from(HOSTS))))
def test_there_are_never_too_many_and_the_newest_stays(
    came: list[tuple[int, str]],
) -> None:
    half_open, inside = HalfOpen[tuple[int, int]](4), set()
    for turn, (number, host) in enumerate(came):
        inside.add((turn, number))
        victim = half_open.add((turn, number), host)
        assert victim != (turn, number)
        if victim is not None:
            inside.remove(victim)
        assert len(half_open) == len(inside) <= 4
        if number % 2:
            half_open.note_spoken((turn, number))
