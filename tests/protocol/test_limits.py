from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from asynckv.errors import RemoteProtocolError
from asynckv.protocol.codec import BODY_PART_BYTES, Bodies, encode_frame
from asynckv.protocol.frames import Get, Insert, Select
from asynckv.protocol.limits import Rate, Share, Unfinished
from asynckv.protocol.session import Session
from asynckv.protocol.values import Limits

PART = bytes(BODY_PART_BYTES)


class Ended:
    """Links by name, and which of them had to end, in order."""

    def __init__(self, max_bytes: int) -> None:
        self.whole = Unfinished(max_bytes)
        self.names: list[str] = []

    def share(self, name: str) -> Share:
        return Share(self.whole, lambda error: self.names.append(name))


def test_of_those_who_have_more_than_their_share_who_began_first_ends() -> None:
    ended = Ended(10)
    first, second = ended.share("first"), ended.share("second")
    first.add(1, 4)
    second.add(1, 4)
    first.add(3, 2)
    assert ended.names == [] and ended.whole.nbytes == 10
    second.add(1, 1)
    assert ended.names == ["first"] and ended.whole.nbytes == 5


def test_what_is_whole_makes_room_and_is_not_old_any_more() -> None:
    ended = Ended(21)
    first, second = ended.share("first"), ended.share("second")
    first.add(1, 10)
    second.add(1, 11)
    first.finish(1)
    assert (first.nbytes, second.nbytes) == (0, 11)
    first.add(3, 10)
    assert ended.names == []
    first.add(3, 1)
    assert ended.names == ["second"]


def test_who_has_little_stays_though_it_began_first() -> None:
    ended = Ended(10)
    slow, greedy, last = (ended.share(name) for name in ("slow", "greedy", "last"))
    slow.add(1, 2)
    greedy.add(1, 4)
    last.add(1, 5)
    assert ended.names == ["greedy"] and ended.whole.nbytes == 7


def test_as_many_end_as_are_needed_and_the_last_may_be_oneself() -> None:
    ended = Ended(10)
    shares = [ended.share(str(number)) for number in range(3)]
    shares[0].add(1, 4)
    shares[1].add(1, 4)
    shares[2].add(1, 9)
    assert ended.names == ["0", "2"] and ended.whole.nbytes == 4
    shares[1].add(3, 7)
    assert ended.names == ["0", "2", "1"] and ended.whole.nbytes == 0


def test_a_link_that_has_ended_counts_no_more() -> None:
    ended = Ended(10)
    share = ended.share("it")
    share.add(1, 7)
    share.end()
    share.add(3, 70)
    share.finish(1)
    assert ended.whole.nbytes == 0 and ended.names == []


def test_bodies_count_until_they_are_whole_or_forgotten() -> None:
    ended = Ended(10**6)
    bodies = Bodies(Limits())
    bodies.share = ended.share("it")
    bodies.begin(1, Get("k"), PART)
    bodies.go_on(1, PART)
    bodies.begin(3, Get("k"), PART)
    assert ended.whole.nbytes == 3 * BODY_PART_BYTES
    bodies.finish(1, b"end")
    assert ended.whole.nbytes == BODY_PART_BYTES
    bodies.clear()
    assert ended.whole.nbytes == 0


def test_a_session_says_why_it_has_to_end_and_forgets_what_it_kept() -> None:
    whole, errors = Unfinished(BODY_PART_BYTES), list[RemoteProtocolError]()
    sessions = [Session[str](Limits(), dialled=False) for _ in range(2)]
    for session in sessions:
        session.share(whole, errors.append)
    first, *_ = encode_frame(1, Select(has_key=True), bytes(2 * BODY_PART_BYTES))
    for session in sessions:
        assert list(session.receive(first)) == []
    (error,) = errors
    assert "65536 bytes" in str(error) and "its share" in str(error)
    assert "send less" in error.hint
    assert whole.nbytes == BODY_PART_BYTES
    sessions[1].end_streams()
    assert whole.nbytes == 0


@pytest.mark.parametrize("nbytes", [1, BODY_PART_BYTES])
def test_a_body_in_one_part_is_never_unfinished(nbytes: int) -> None:
    ended = Ended(0)
    session = Session[str](Limits(), dialled=False)
    session.share(ended.whole, lambda error: ended.names.append("it"))
    data = b"".join(encode_frame(1, Insert("e", 1, inline=False), bytes(nbytes)))
    (_,) = session.receive(data)
    assert ended.names == []


@pytest.mark.parametrize(
    ("made", "spends"),
    [
        pytest.param(
            (10, 100, 0.0),
            [(100, 0.0, True), (1, 0.0, False)],
            id="so many at once and no more",
        ),
        pytest.param(
            (10, 100, 0.0),
            [(100, 0.0, True), (10, 1.0, True), (5, 1.5, True), (6, 2.0, False)],
            id="a second adds as many as may come in one",
        ),
        pytest.param(
            (10, 100, 0.0),
            [(101, 1000.0, False)],
            id="what was not used is not saved up",
        ),
        pytest.param(
            (10, 1, 0.0), [(10, 0.0, True)], id="it is worth a second at least"
        ),
        pytest.param(
            (10, 10, 5.0),
            [(10, 5.0, True), (1, 4.0, False)],
            id="a clock that goes back earns nothing",
        ),
    ],
)
def test_a_rate_lets_so_many_come(
    made: tuple[int, int, float], spends: list[tuple[int, float, bool]]
) -> None:
    rate = Rate(*made)
    assert [rate.spend(count, now) for count, now, _ in spends] == [
        may for _, _, may in spends
    ]


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0, 1)), max_size=50))
def test_nobody_has_more_than_the_budget(events: list[tuple[int, float]]) -> None:
    rate, now, spent = Rate(10, 100, 0.0), 0.0, 0
    for count, passed in events:
        now += passed
        if not rate.spend(count, now):
            return
        spent += count
        assert spent <= 100 + 10 * now + 1e-6
