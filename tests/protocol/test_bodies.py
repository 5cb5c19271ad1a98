from __future__ import annotations

import pytest

from asynckv.errors import RemoteProtocolError
from asynckv.protocol.bodies import BODY_PART_BYTES, Bodies, max_unfinished_bytes
from asynckv.protocol.frames import Get
from asynckv.protocol.header import TYPE_CONTINUATION, TYPE_CONTROL, Header
from asynckv.protocol.values import Limits

FULL = bytes(BODY_PART_BYTES)


def control(stream: int, nbytes: int = BODY_PART_BYTES, *, more: bool = True) -> Header:
    return Header(TYPE_CONTROL, more, 10, nbytes, stream, 0)


def test_a_body_is_whole_with_its_last_part() -> None:
    bodies = Bodies(Limits())
    bodies.begin(1, Get("k"), FULL)
    bodies.go_on(1, FULL)
    assert bodies.finish(1, b"end") == (1, Get("k"), FULL + FULL + b"end")
    assert not bodies.streams


def test_many_bodies_at_a_time_are_bounded_together() -> None:
    limits = Limits(max_body_bytes=3 * BODY_PART_BYTES)
    bodies = Bodies(limits)
    for stream in range(max_unfinished_bytes(limits) // BODY_PART_BYTES):
        bodies.check(control(stream))
        bodies.begin(stream, Get("k"), FULL)
    with pytest.raises(RemoteProtocolError, match="unfinished bodies"):
        bodies.check(control(99))
    bodies.clear()
    bodies.check(control(99))


def test_a_part_that_belongs_to_nothing_is_refused() -> None:
    header = Header(TYPE_CONTINUATION, False, 0, 10, 1, 0)
    with pytest.raises(RemoteProtocolError, match="never began"):
        Bodies(Limits()).check(header)
