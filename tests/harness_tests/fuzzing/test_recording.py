from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from asynckv.protocol.codec import encode_frame
from asynckv.protocol.frames import Attach, Get, Ping
from asynckv.protocol.wire import encode_chunk_header
from asynckv.testing.faults.hostile import RawConnection, RawListener
from asynckv.testing.faults.proxy import Proxy
from harness.fuzzing.recording import Recording, Segment, Tap, heard

CONTROL = [encode_frame(0, Ping(1))[0], encode_frame(1, Get("k"))[0]]
LANE = encode_frame(0, Attach(b"token", 0))[0] + encode_chunk_header(1, 0, 0, 2) + b"ab"
RECORDED = Recording(
    (
        Segment(0, True, CONTROL[0]),
        Segment(1, True, LANE),
        Segment(0, False, CONTROL[0]),
        Segment(0, True, CONTROL[1]),
    )
)


def test_a_recording_tells_its_connections_apart() -> None:
    control, lane = RECORDED.connections
    assert (control.is_lane, lane.is_lane) == (False, True)
    assert control.said(to_listener=True) == b"".join(CONTROL)
    assert len(control.frames(to_listener=False)) == 1
    assert RECORDED.control() == [b"".join(CONTROL), CONTROL[0]]
    assert [frame for frame, _ in RECORDED.frames()] == [Ping(1), Get("k"), Ping(1)]
    assert RECORDED.nbytes == 2 * len(CONTROL[0]) + len(CONTROL[1]) + len(LANE)


def test_a_recording_is_read_as_it_was_saved(tmp_path: Path) -> None:
    RECORDED.save(tmp_path / "it")
    assert Recording.load(tmp_path / "it") == RECORDED
    (tmp_path / "it").write_bytes(b"else")
    with pytest.raises(msgspec.MsgspecError):
        Recording.load(tmp_path / "it")


def test_joined_recordings_keep_their_connections_apart() -> None:
    joined = Recording.joined([RECORDED, Recording(()), RECORDED])
    assert [c.number for c in joined.connections] == [0, 1, 2, 3]
    assert joined.control() == 2 * RECORDED.control()


async def test_a_tap_keeps_what_passes_and_changes_nothing() -> None:
    with RawListener() as listener:
        async with Proxy(listener.url) as proxy:
            tap = proxy.add(Tap())
            with tap, await RawConnection.dial(proxy.url) as near:
                far = await listener.accept()
                await near.send(b"there")
                assert await far.receive(5) == b"there"
                await far.send(b"and back")
                assert await near.receive(8) == b"and back"
    (connection,) = tap.recording.connections
    assert connection.said(to_listener=True) == b"there"
    assert connection.said(to_listener=False) == b"and back"


async def test_what_is_heard_is_what_passes_meanwhile() -> None:
    with RawListener() as listener:

        async def play(url: str, tap: Tap) -> None:
            with await RawConnection.dial(url) as near:
                far = await listener.accept()
                await near.send(b"there")
                await far.receive(5)

        (connection,) = (await heard(listener.url, play)).connections
    assert connection.said(to_listener=True) == b"there"
