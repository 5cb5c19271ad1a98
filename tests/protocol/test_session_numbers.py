from __future__ import annotations

from typing import get_args

import pytest

from asynckv.errors import LocalProtocolError, RemoteProtocolError
from asynckv.protocol.frames import (
    Accepted,
    Frame,
    Get,
    Hello,
    OpeningFrame,
    Ping,
    Proof,
    Took,
)
from asynckv.protocol.session import MAX_STREAM, ROLES, Opened, Role, StreamIds
from asynckv.protocol.transfer_frames import Grant
from asynckv.protocol.values import Limits, PeerIdentity
from harness.session_pairs import ask, far, hear, near, pump


def test_each_side_counts_its_own_streams() -> None:
    a, b = near(), far()
    assert [ask(a), ask(a)] == [1, 3]
    assert [ask(b), ask(b)] == [2, 4]


@pytest.mark.parametrize(
    ("stream", "frame", "says"),
    [
        (1, Grant(1), "Grant for stream 1, never opened"),
        (2, Grant(1), "Grant for stream 2, never opened"),
        (2, Get("k"), "Get opens stream 2, which it cannot"),
        (2**32 - 1, Get("k"), "Get opens stream 4294967295, which it cannot"),
        (1, Ping(1), "Ping on a stream"),
        (0, Get("k"), "Get on an open link"),
        (0, Hello(1, 0, PeerIdentity("a", "1"), Limits(), (), 1), "on an open link"),
    ],
)
def test_a_frame_out_of_place_breaks_the_link(
    stream: int, frame: Frame, says: str
) -> None:
    with pytest.raises(RemoteProtocolError, match=says):
        hear(far(), stream, frame)


def test_a_stream_cannot_be_opened_twice() -> None:
    for again in (3, 5):
        b = far()
        for stream in (3, 5):
            hear(b, stream, Get("k"))
        with pytest.raises(RemoteProtocolError, match=f"Get opens stream {again}, wh"):
            hear(b, again, Get("k"))


def test_streams_that_were_passed_may_still_come_each_once() -> None:
    b = far()
    for stream in (7, 3, 1, 5):
        hear(b, stream, Get("k"))
    for stream in (1, 3, 5):
        with pytest.raises(RemoteProtocolError, match="which it cannot"):
            hear(b, stream, Get("k"))


@pytest.mark.parametrize(
    ("streams", "beyond"), [((5,), 9), ((3, 7), 11), ((5, 1), 11), ((), 7)]
)
def test_no_more_streams_may_be_passed_than_may_be_open(
    streams: tuple[int, ...], beyond: int
) -> None:
    b = far(Limits(max_streams=2))
    for stream in streams:
        hear(b, stream, Get("k"))
        b.send(stream, Accepted())
    with pytest.raises(RemoteProtocolError, match="which it cannot"):
        hear(b, beyond, Get("k"))


def test_a_long_request_may_be_passed_by_later_ones() -> None:
    a, b = near(), far()
    a.open("long", Get("long"), bytes(300_000))
    a.open("short", Get("short"))
    events = pump(a, b)
    assert [e.stream for e in events if isinstance(e, Opened)] == [3, 1]


def test_a_stream_that_was_passed_is_not_open_yet() -> None:
    b = far()
    hear(b, 3, Get("k"))
    with pytest.raises(RemoteProtocolError, match="never opened"):
        hear(b, 1, Grant(1))


def test_too_many_streams_break_the_link() -> None:
    b = far(Limits(max_streams=3))
    for stream in (1, 3, 5):
        hear(b, stream, Get("k"))
    b.send(1, Accepted())
    hear(b, 7, Get("k"))
    with pytest.raises(RemoteProtocolError, match="more than 3 streams"):
        hear(b, 9, Get("k"))


def test_a_link_ends_when_it_has_used_up_its_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asynckv.protocol.session.MAX_STREAM", 3)
    a = near()
    assert ask(a) == 1 and a.has_streams_left
    assert ask(a) == 3 and not a.has_streams_left
    said = a.outbox.nbytes
    with pytest.raises(LocalProtocolError, match="reconnect"):
        ask(a)
    assert a.outbox.nbytes == said


@pytest.fixture
def ids() -> StreamIds:
    return StreamIds(dialled=True, max_skipped=2)


def test_who_dialled_has_odd_ids_and_the_other_even_ones(ids: StreamIds) -> None:
    assert ids.next_own() == 1
    assert StreamIds(dialled=False, max_skipped=0).next_own() == 2


def test_an_id_is_next_until_it_is_used(ids: StreamIds) -> None:
    assert ids.next_own() == 1
    ids.last_own = 1
    assert ids.next_own() == 3


def test_own_ids_end(ids: StreamIds) -> None:
    ids.last_own = MAX_STREAM - 2
    assert ids.next_own() == MAX_STREAM
    ids.last_own = MAX_STREAM
    with pytest.raises(LocalProtocolError, match="used up"):
        ids.next_own()


def test_an_id_of_the_peer_is_used_once(ids: StreamIds) -> None:
    assert ids.take_theirs(2)
    assert not ids.take_theirs(2)


def test_a_skipped_id_may_come_later_and_once(ids: StreamIds) -> None:
    assert ids.take_theirs(4)
    assert not ids.was_used(2)
    assert ids.take_theirs(2)
    assert ids.was_used(2)
    assert not ids.take_theirs(2)


def test_so_many_may_be_skipped_and_no_more(ids: StreamIds) -> None:
    assert not ids.take_theirs(8)
    assert ids.take_theirs(6)
    assert not ids.take_theirs(10)
    assert ids.take_theirs(8)


def test_each_side_has_ids_of_its_own(ids: StreamIds) -> None:
    ids.last_own = 5
    assert ids.was_used(5) and not ids.was_used(7)
    assert not ids.was_used(2)


def test_every_frame_has_a_role() -> None:
    assert ROLES.keys() == set(get_args(Frame))


def test_every_opening_frame_opens() -> None:
    opening = {frame for frame, role in ROLES.items() if role is Role.OPENS}
    assert opening == set(get_args(OpeningFrame))


@pytest.mark.parametrize(
    ("frame", "role"),
    [
        (Grant, Role.GOES_ON),
        (Took, Role.ASKS_LAST),
        (Accepted, Role.ANSWERS_LAST),
        (Ping, Role.OF_THE_LINK),
        (Proof, Role.OF_THE_LINK),
    ],
)
def test_a_frame_does_to_its_stream_what_it_is_for(frame: type, role: Role) -> None:
    assert ROLES[frame] is role
