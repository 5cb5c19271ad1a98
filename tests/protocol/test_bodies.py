from __future__ import annotations

import pytest

from asynckv.errors import RemoteProtocolError
from asynckv.protocol.codec import BODY_PART_BYTES, Bodies, max_unfinished_bytes
from asynckv.protocol.frames import Get
from asynckv.protocol.values import Limits
from asynckv.protocol.wire import TYPE_CONTINUATION, TYPE_CONTROL, Header

FULL = bytes(BODY_PART_BYTES)


def control(stream: int, nbytes: int = BODY_PART_BYTES, *, more: bool = True) -> Header:
    return Header(TYPE_CONTROL, more, 10, nbytes, stream, 0)


def continuation(
    stream: int, nbytes: int = BODY_PART_BYTES, *, more: bool = False
) -> Header:
    return Header(TYPE_CONTINUATION, more, 0, nbytes, stream, 0)


def test_a_body_is_whole_with_its_last_part() -> None:
    bodies = Bodies(Limits())
    bodies.begin(1, Get("k"), FULL)
    bodies.go_on(1, FULL)
    assert bodies.finish(1, b"end") == (1, Get("k"), FULL + FULL + b"end")
    assert not bodies.streams


def test_many_bodies_at_a_time_are_bounded_together() -> None:
    limits = Limits(max_body_bytes=3 * BODY_PART_BYTES)
    bodies = Bodies(limits)
    for _ in range(2):
        for stream in range(max_unfinished_bytes(limits) // BODY_PART_BYTES):
            bodies.check(control(stream))
            bodies.begin(stream, Get("k"), FULL)
        with pytest.raises(RemoteProtocolError, match="unfinished bodies"):
            bodies.check(control(99))
        bodies.clear()


def test_a_body_that_is_whole_makes_room_for_others() -> None:
    limits = Limits(max_body_bytes=3 * BODY_PART_BYTES)
    bodies = Bodies(limits)
    for stream in range(3):
        bodies.begin(stream, Get("k"), FULL)
        bodies.go_on(stream, FULL)
    with pytest.raises(RemoteProtocolError, match="458752 bytes of unfinished bodies"):
        bodies.check(control(99))
    bodies.finish(0, FULL)
    for stream in (98, 99):
        bodies.check(control(stream))
        bodies.begin(stream, Get("k"), FULL)
    with pytest.raises(RemoteProtocolError, match="more than 393216"):
        bodies.check(control(97))


def test_a_body_may_be_as_long_as_the_limit_and_no_longer() -> None:
    bodies = Bodies(Limits(max_body_bytes=2 * BODY_PART_BYTES))
    bodies.check(control(1))
    bodies.begin(1, Get("k"), FULL)
    bodies.check(continuation(1))
    with pytest.raises(RemoteProtocolError, match="at least 131073 bytes"):
        bodies.check(continuation(1, more=True))
    bodies = Bodies(Limits(max_body_bytes=3 * BODY_PART_BYTES))
    bodies.begin(1, Get("k"), FULL)
    bodies.go_on(1, FULL)
    bodies.check(continuation(1))
    bodies.go_on(1, FULL)
    with pytest.raises(RemoteProtocolError, match="more than 196608"):
        bodies.check(continuation(1, 1))


@pytest.mark.parametrize("nbytes", [0, 1, 10, BODY_PART_BYTES])
def test_a_small_body_is_as_long_as_it_likes_to_be(nbytes: int) -> None:
    limits = Limits(max_control_bytes=10, max_body_bytes=BODY_PART_BYTES)
    Bodies(limits).check(control(1, nbytes, more=False))


def test_a_part_that_belongs_to_nothing_is_refused() -> None:
    header = Header(TYPE_CONTINUATION, False, 0, 10, 1, 0)
    with pytest.raises(RemoteProtocolError, match="never began"):
        Bodies(Limits()).check(header)
