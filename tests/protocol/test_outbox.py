from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from asynckv.errors import LocalProtocolError
from asynckv.protocol.codec import BODY_PART_BYTES, FrameDecoder, encode_frame
from asynckv.protocol.frames import Cancel, Frame, Get, Goodbye, Ping
from asynckv.protocol.outbox import Outbox
from asynckv.protocol.values import Limits
from asynckv.protocol.wire import unpack_header

LONG = 3 * BODY_PART_BYTES + 5


def drain(outbox: Outbox, max_bytes: int = 1) -> list[tuple[int, Frame, bytes]]:
    """Everything that is sent, as the peer sees it."""
    decoder = FrameDecoder()
    frames: list[tuple[int, Frame, bytes]] = []
    while outbox:
        frames += decoder.feed(outbox.take(max_bytes))
    return frames


def test_an_empty_outbox_has_nothing_to_send() -> None:
    outbox = Outbox(Limits(), own_parity=1)
    assert not outbox
    assert outbox.take(100) == b""


def test_small_frames_leave_together_in_order() -> None:
    outbox = Outbox(Limits(), own_parity=1)
    outbox.put(1, Get("a"))
    outbox.put(3, Get("b"), b"body")
    data = outbox.take(10_000)
    assert data == encode_frame(1, Get("a"))[0] + encode_frame(3, Get("b"), b"body")[0]
    assert (outbox.nbytes, outbox.answer_bytes) == (0, 0)


def test_no_more_small_frames_are_taken_than_fit() -> None:
    outbox = Outbox(Limits(), own_parity=1)
    for stream in range(1, 11, 2):
        outbox.put(stream, Get("a"))
    small = len(encode_frame(1, Get("a"))[0])
    sizes = [len(outbox.take(2 * small)) for _ in range(4)]
    assert sizes == [2 * small, 2 * small, small, 0]


def test_no_more_parts_are_taken_than_fit() -> None:
    outbox = Outbox(Limits(), own_parity=1)
    outbox.put(3, Get("short"))
    outbox.put(1, Get("long"), bytes(LONG))
    short, first = encode_frame(3, Get("short"))[0], encode_frame(1, Get("long"))[0]
    fits = len(short) + len(first) + BODY_PART_BYTES
    assert len(outbox.take(fits)) == fits


def test_bodies_take_turns() -> None:
    outbox = Outbox(Limits(), own_parity=1)
    for stream in (1, 3, 5):
        outbox.put(stream, Get("a"), bytes(LONG))
    assert [unpack_header(outbox.take(1)).stream for _ in range(12)] == [1, 3, 5] * 4


def test_a_frame_waits_for_one_part_of_another_streams_body_at_most() -> None:
    outbox = Outbox(Limits(), own_parity=1)
    outbox.put(1, Get("long"), bytes(LONG))
    decoder = FrameDecoder()
    assert not list(decoder.feed(outbox.take(1)))
    outbox.put(3, Get("short"))
    assert [stream for stream, _, _ in decoder.feed(outbox.take(1))] == [3]


def test_what_waits_is_counted_until_it_has_left() -> None:
    outbox = Outbox(Limits(), own_parity=1)
    outbox.put(2, Get("long"), bytes(LONG))
    left = [outbox.nbytes]
    assert outbox.answer_bytes == outbox.nbytes
    while outbox:
        outbox.take(1)
        left.append(outbox.nbytes)
    headers = 200
    parts_sent = [LONG - sent * BODY_PART_BYTES for sent in range(4)]
    assert left == [*(pytest.approx(nbytes, abs=headers) for nbytes in parts_sent), 0]


def test_frames_behind_a_long_body_keep_their_streams_order() -> None:
    outbox = Outbox(Limits(), own_parity=1)
    for body in (bytes(LONG), b"", bytes(LONG), b"x"):
        outbox.put(1, Get("a"), body)
    outbox.put(1, Cancel())
    sizes = [(type(frame), len(body)) for _, frame, body in drain(outbox)]
    assert sizes == [(Get, LONG), (Get, 0), (Get, LONG), (Get, 1), (Cancel, 0)]


def test_a_long_body_keeps_behind_what_its_stream_said_before() -> None:
    outbox = Outbox(Limits(), own_parity=1)
    for key in "abc":
        outbox.put(1, Get(key))
    outbox.put(1, Get("long"), bytes(LONG))
    keys = [frame.key for _, frame, _ in drain(outbox) if isinstance(frame, Get)]
    assert keys == ["a", "b", "c", "long"]


def test_an_urgent_frame_passes_all_others_and_the_last_one_waits_for_all() -> None:
    outbox = Outbox(Limits(), own_parity=1)
    outbox.put(1, Get("long"), bytes(LONG))
    outbox.put_last(Goodbye())
    outbox.put(3, Get("short"))
    outbox.put_first(Ping(7))
    sent = [frame for _, frame, _ in drain(outbox)]
    assert sent == [Ping(7), Get("short"), Get("long"), Goodbye()]
    outbox.put_first(Ping(8))
    assert drain(outbox) == [(0, Ping(8), b"")]


def test_the_end_of_a_stream_may_stand_behind_what_is_put_later() -> None:
    outbox = Outbox(Limits(), own_parity=1)
    outbox.put_behind(1, Cancel())
    outbox.put(3, Get("a"))
    outbox.close_up()
    outbox.put(5, Get("b"))
    outbox.put_last(Goodbye())
    assert [stream for stream, _, _ in drain(outbox, 1000)] == [3, 1, 5, 0]
    assert (outbox.nbytes, outbox.behind_count) == (0, 0)


def test_the_end_of_a_stream_follows_its_long_body() -> None:
    outbox = Outbox(Limits(), own_parity=1)
    outbox.put(1, Get("long"), bytes(LONG))
    outbox.put_behind(1, Cancel())
    assert outbox.answer_bytes == 0
    assert [type(frame) for _, frame, _ in drain(outbox)] == [Get, Cancel]


def test_what_stands_behind_is_counted() -> None:
    outbox = Outbox(Limits(), own_parity=1)
    for stream in (1, 3, 5):
        outbox.put_behind(stream, Cancel())
    assert outbox.behind_count == 3
    assert outbox.answer_bytes == 0 < outbox.nbytes
    outbox.clear()
    assert (outbox.behind_count, outbox.nbytes) == (0, 0)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_body_of_one_part_leaves_whole(more: int) -> None:
    outbox = Outbox(Limits(), own_parity=1)
    outbox.put(1, Get("a"), bytes(BODY_PART_BYTES + more))
    assert [len(body) for _, _, body in drain(outbox)] == [BODY_PART_BYTES + more]


def test_where_a_long_body_leaves_nothing_stands_behind() -> None:
    outbox = Outbox(Limits(), own_parity=1)
    for stream in (1, 3):
        outbox.put(stream, Get("long"), bytes(LONG))
    outbox.put_behind(3, Cancel())
    outbox.put(5, Get("short"))
    streams = [stream for stream, _, _ in drain(outbox)]
    assert streams.index(3) < len(streams) - 1 - streams[::-1].index(3)
    assert outbox.nbytes == 0


def test_only_frames_on_the_peers_streams_count_as_answers() -> None:
    outbox = Outbox(Limits(), own_parity=1)
    outbox.put(1, Get("ours"), bytes(1000))
    assert outbox.answer_bytes == 0
    for stream in (2, 4):
        outbox.put(stream, Get("theirs"), bytes(1000))
    theirs = len(encode_frame(2, Get("theirs"), bytes(1000))[0])
    assert outbox.answer_bytes == 2 * theirs < outbox.nbytes


def test_bodies_under_way_keep_to_what_the_peer_takes() -> None:
    limits = Limits(max_body_bytes=2 * BODY_PART_BYTES)
    outbox = Outbox(limits, own_parity=1)
    for stream in range(1, 40, 2):
        outbox.put(stream, Get("a"), bytes(2 * BODY_PART_BYTES))
    decoder = FrameDecoder(limits)
    count = 0
    while outbox:
        count += len(list(decoder.feed(outbox.take(1))))
    assert count == 20


def test_a_body_that_left_makes_room_for_others() -> None:
    limits = Limits(max_body_bytes=2 * BODY_PART_BYTES)
    outbox = Outbox(limits, own_parity=1)
    for _ in range(2):
        for stream in range(1, 9, 2):
            outbox.put(stream, Get("a"), bytes(2 * BODY_PART_BYTES))
        streams = []
        while outbox:
            streams.append(unpack_header(outbox.take(1)).stream)
        assert streams == [1, 3, 1, 3, 5, 7, 5, 7]


def test_frames_of_the_link_itself_keep_to_its_limits_and_count_as_answers() -> None:
    outbox = Outbox(Limits(max_control_bytes=30), own_parity=1)
    for put in (outbox.put_first, outbox.put_last):
        with pytest.raises(LocalProtocolError, match="bytes of control"):
            put(Goodbye("x" * 30))
        before = outbox.answer_bytes
        put(Goodbye("x"))
        assert outbox.answer_bytes == outbox.nbytes > before
    drain(outbox)
    assert (outbox.nbytes, outbox.answer_bytes) == (0, 0)


def test_a_body_is_copied_when_it_is_put() -> None:
    outbox = Outbox(Limits(), own_parity=1)
    body = bytearray(LONG)
    outbox.put(1, Get("a"), body)
    body[:] = b"x" * LONG
    assert drain(outbox)[0][2] == bytes(LONG)


def test_what_exceeds_the_limits_is_refused_and_leaves_no_trace() -> None:
    outbox = Outbox(Limits(max_body_bytes=10), own_parity=1)
    with pytest.raises(LocalProtocolError, match="body of Get"):
        outbox.put(1, Get("a"), bytes(11))
    assert not outbox


def test_a_cleared_outbox_is_empty() -> None:
    outbox = Outbox(Limits(), own_parity=1)
    outbox.put(2, Get("a"), bytes(LONG))
    outbox.put_last(Goodbye())
    outbox.take(1)
    outbox.clear()
    assert (outbox.nbytes, outbox.answer_bytes, outbox.take(1)) == (0, 0, b"")


_SIZES = st.sampled_from([0, 1, 100, 65535, 65536, 65537, 131072, 131073, 300_000])


@given(
    st.lists(st.tuples(st.integers(1, 4), _SIZES), max_size=12),
    st.integers(1, 400_000),
)
def test_everything_put_is_sent_once_in_its_streams_order(
    frames: list[tuple[int, int]], max_bytes: int
) -> None:
    outbox = Outbox(Limits(), own_parity=1)
    for number, (stream, nbytes) in enumerate(frames):
        outbox.put(stream, Get(str(number)), bytes(nbytes))
    sent = drain(outbox, max_bytes)
    assert (outbox.nbytes, outbox.answer_bytes) == (0, 0)
    for stream in range(1, 5):
        expected = [(str(n), b) for n, (s, b) in enumerate(frames) if s == stream]
        got = [(f.key, len(b)) for s, f, b in sent if s == stream and type(f) is Get]
        assert got == expected
