from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from asynckv.errors import LocalProtocolError, RemoteProtocolError
from asynckv.protocol import frames, values
from asynckv.protocol.codec import (
    BODY_PART_BYTES,
    Bodies,
    FrameDecoder,
    encode_frame,
    max_unfinished_bytes,
)
from asynckv.protocol.frames import (
    Accepted,
    Frame,
    Get,
    Offer,
    Select,
)
from asynckv.protocol.transfer_frames import Grant
from asynckv.protocol.values import Limits
from asynckv.protocol.wire import (
    HEADER_BYTES,
    TYPE_CHUNK,
    TYPE_CONTINUATION,
    TYPE_CONTROL,
    Header,
    checksum_of,
    pack_header,
)

Event = tuple[int, Frame, bytes]

# The same as without an alphabet, which takes a second to list.
_TEXTS = st.text(st.characters(exclude_categories=["Cs"]))

SESSION: list[Event] = [
    (1, Select(has_key=True), b"12345678"),
    (3, Get("name"), bytes(range(256)) * 520),
    (1, Offer(4, inline=True, entry_id="e", token=b"t" * 16), b"payload"),
    (5, Grant(9), b""),
    (1, Accepted(), b""),
]
RECORDED = b"".join(part for event in SESSION for part in encode_frame(*event))


def raw(control: bytes, body: bytes = b"", **kwargs: Any) -> bytes:
    """A well-formed control frame around any ``control`` bytes."""
    kwargs = {"stream": 1, "checksum": checksum_of(control, body), **kwargs}
    return pack_header(TYPE_CONTROL, len(control), len(body), **kwargs) + control + body


def decode(*pieces: bytes, limits: Limits | None = None) -> list[Event]:
    decoder = FrameDecoder(limits or Limits())
    return [event for piece in pieces for event in decoder.feed(piece)]


def test_every_frame_comes_back_with_its_stream_and_body() -> None:
    assert decode(RECORDED) == SESSION


@pytest.mark.parametrize(
    ("nbytes", "count"),
    [
        (0, 1),
        (BODY_PART_BYTES - 1, 1),
        (BODY_PART_BYTES, 1),
        (BODY_PART_BYTES + 1, 2),
        (2 * BODY_PART_BYTES, 2),
        (2 * BODY_PART_BYTES + 1, 3),
    ],
)
def test_a_body_is_cut_in_as_few_parts_as_hold_it(nbytes: int, count: int) -> None:
    parts = encode_frame(1, Get("a"), bytes(nbytes))
    assert len(parts) == count
    assert decode(*parts) == [(1, Get("a"), bytes(nbytes))]


@given(st.lists(st.integers(0, len(RECORDED)), max_size=30))
def test_any_chunking_gives_the_same_frames(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(RECORDED)]
    pieces = [RECORDED[a:b] for a, b in itertools.pairwise(edges)]
    assert decode(*pieces) == SESSION


@pytest.mark.parametrize("kind", [bytearray, lambda data: memoryview(bytearray(data))])
def test_memory_that_was_fed_may_be_used_again_at_once(
    kind: Callable[[bytes], bytearray | memoryview],
) -> None:
    data = kind(RECORDED)
    events = FrameDecoder().feed(data)
    data[:] = bytes(len(data))
    assert list(events) == SESSION


def test_byte_by_byte_gives_the_same_frames() -> None:
    small = encode_frame(1, Get("a"), b"xyz")[0] * 3
    assert len(decode(*(small[i : i + 1] for i in range(len(small))))) == 3


def test_a_decoder_asks_for_no_byte_beyond_its_frame() -> None:
    decoder = FrameDecoder()
    data = encode_frame(7, Get("a"), b"body")[0]
    taken = 0
    events: list[Event] = []
    while not events:
        piece = data[taken : taken + decoder.missing_bytes]
        taken += len(piece)
        events += decoder.feed(piece)
    assert taken == len(data)
    assert decoder.is_idle


def test_every_cut_gives_a_prefix_of_the_frames_and_is_noticed() -> None:
    ends = {0}
    for event in SESSION:
        ends.add(max(ends) + sum(map(len, encode_frame(*event))))
    near = {e + d for e in ends for d in (-38, -36, -1, 0, 1, 35, 36, 37)}
    for cut in sorted(near | set(range(0, len(RECORDED), 997))):
        decoder = FrameDecoder()
        events = list(decoder.feed(RECORDED[: max(cut, 0)]))
        assert events == SESSION[: len(events)]
        assert decoder.is_idle == (max(cut, 0) in ends or cut > len(RECORDED))


def test_one_frame_with_a_flipped_bit_or_beyond_the_limits_is_refused() -> None:
    (data,) = encode_frame(1, Get("a"), b"xyz")
    for bit in range(len(data) * 8):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        assert _is_nothing_or_refused(FrameDecoder(), bytes(changed))
    assert _is_nothing_or_refused(FrameDecoder(Limits(max_body_bytes=2)), data)
    assert _is_nothing_or_refused(FrameDecoder(Limits(max_control_bytes=2)), data)
    assert _is_nothing_or_refused(FrameDecoder(), raw(b"\xc1"))


def _is_nothing_or_refused(decoder: FrameDecoder, data: bytes) -> bool:
    try:
        return not list(decoder.feed(data))
    except RemoteProtocolError:
        return True


def _bits_of_interest() -> list[int]:
    # One in a thousand of those of a long body will do.
    head = range(400 * 8)
    tail = range((len(RECORDED) - 300) * 8, len(RECORDED) * 8)
    return [*head, *tail, *range(0, len(RECORDED) * 8, 8009)]


def test_no_flipped_bit_is_taken_for_a_frame() -> None:
    for bit in _bits_of_interest():
        changed = bytearray(RECORDED)
        changed[bit // 8] ^= 1 << bit % 8
        decoder = FrameDecoder()
        with pytest.raises(RemoteProtocolError):
            list(decoder.feed(changed + bytes(HEADER_BYTES)))
        with pytest.raises(RemoteProtocolError):
            list(decoder.feed(b""))


@settings(max_examples=300)
@given(st.binary(max_size=2000))
def test_any_bytes_give_frames_or_a_documented_error(data: bytes) -> None:
    for candidate in (data, raw(data), raw(b"", data)):
        try:
            decode(candidate)
        except RemoteProtocolError as exc:
            assert str(exc)


@settings(max_examples=300)
@given(
    st.recursive(st.none() | st.integers(-1, 2**63) | _TEXTS, st.lists, max_leaves=8)
)
def test_any_msgpack_gives_frames_or_a_documented_error(value: Any) -> None:
    for content in (value, {"t": "get", "key": value}, {"t": value}):
        with pytest.raises(RemoteProtocolError):
            decode(raw(msgspec.msgpack.encode(content)) + b"x" * HEADER_BYTES)


@pytest.mark.parametrize(
    "control",
    [
        b"",
        b"\xc1",
        b"\x91" * 60_000,
        b"\x82\xa1t\xa3get\xa3key\xa2\xff\xfe",
        b"\xdf\xff\xff\xff\xff",
        msgspec.msgpack.encode({"t": "get", "key": "k", "more": 1}),
        msgspec.msgpack.encode({"t": "get", "key": "k" * 513}),
        msgspec.msgpack.encode({"t": "grant", "transfer": 2**62 + 1}),
        msgspec.msgpack.encode({"t": "grant", "transfer": -1}),
        msgspec.msgpack.encode({"t": "grant"}) + b"\xc0",
    ],
)
def test_a_control_part_that_is_no_frame_is_refused(control: bytes) -> None:
    decoder = FrameDecoder()
    for data in (raw(control), encode_frame(1, Get("a"))[0]):
        with pytest.raises(RemoteProtocolError, match="not a frame that we know"):
            list(decoder.feed(data))


@pytest.mark.parametrize(
    "value", [{"t": "zz\nCRITICAL fake"}, {"t": "ping", "nonce": 1, "\x1b[31m": 1}]
)
def test_what_a_peer_says_is_told_in_one_line(value: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError, match="not a frame that we know") as caught:
        decode(raw(msgspec.msgpack.encode(value)))
    assert str(caught.value).isprintable()
    shown = "".join(traceback.format_exception(caught.value))
    assert "\x1b" not in shown
    assert "\nCRITICAL" not in shown


def test_what_a_peer_says_is_told_but_not_at_length() -> None:
    with pytest.raises(RemoteProtocolError, match="'zzzz") as caught:
        decode(raw(msgspec.msgpack.encode({"t": "zz" * 1000})))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (pack_header(TYPE_CHUNK, 20, 4, 1), "payload chunk"),
        (pack_header(TYPE_CONTROL, 2**32 - 1, 0, 1), "bytes of control"),
        (pack_header(TYPE_CONTROL, 10, 2**64 - 1, 1), "in one frame"),
        (pack_header(TYPE_CONTROL, 10, 65537, 1), "in one frame"),
        (pack_header(TYPE_CONTROL, 10, 100, 1, more=True), "not full"),
        (pack_header(TYPE_CONTINUATION, 0, 100, 1), "never began"),
    ],
)
def test_a_claim_beyond_the_limits_is_refused_at_its_header(
    header: bytes, says: str
) -> None:
    with pytest.raises(RemoteProtocolError, match=says):
        decode(header)


def test_a_body_beyond_its_limit_is_refused_before_it_is_whole() -> None:
    limits = Limits(max_body_bytes=100_000)
    first, *_ = encode_frame(1, Get("a"), bytes(100_001))
    decoder = FrameDecoder(limits)
    assert list(decoder.feed(first)) == []
    with pytest.raises(RemoteProtocolError, match="a body of at least"):
        list(decoder.feed(pack_header(TYPE_CONTINUATION, 0, 34_465, 1)))


def test_unfinished_bodies_are_bounded_together() -> None:
    limits = Limits(max_body_bytes=4 * BODY_PART_BYTES)
    decoder = FrameDecoder(limits)
    count = max_unfinished_bytes(limits) // BODY_PART_BYTES
    for stream in range(count):
        list(decoder.feed(encode_frame(stream, Get("a"), bytes(70_000))[0]))
    with pytest.raises(RemoteProtocolError, match="unfinished"):
        list(decoder.feed(encode_frame(count, Get("a"), bytes(70_000))[0]))


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (encode_frame(1, Get("b"))[0], "in the middle"),
        (pack_header(TYPE_CONTINUATION, 1, 5, 1), "continuation that is none"),
        (pack_header(TYPE_CONTINUATION, 0, 0, 1), "continuation that is none"),
    ],
)
def test_nothing_but_its_continuation_may_follow_half_a_body(
    second: bytes, says: str
) -> None:
    first = encode_frame(1, Get("a"), bytes(70_000))[0]
    with pytest.raises(RemoteProtocolError, match=says):
        decode(first, second)


def test_frames_before_an_error_are_still_given() -> None:
    decoder = FrameDecoder()
    events = decoder.feed(encode_frame(1, Get("a"))[0] + b"x" * HEADER_BYTES)
    assert next(events) == (1, Get("a"), b"")
    with pytest.raises(RemoteProtocolError):
        next(events)


@pytest.mark.parametrize(
    ("pieces", "words"),
    [([b"GET"], "not a frame"), ([b"A", b"KV", b"9"], "it speaks protocol 9")],
)
def test_what_is_no_frame_is_refused_at_its_first_bytes(
    pieces: list[bytes], words: str
) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        decode(*pieces)
    with pytest.raises(RemoteProtocolError, match=words):
        decode(encode_frame(1, Get("a"))[0], *pieces)


def test_a_changed_token_of_a_key_is_found() -> None:
    data = bytearray(encode_frame(1, Select(has_key=True), bytes(80))[0])
    data[-8] ^= 1
    with pytest.raises(RemoteProtocolError, match="fails its checksum"):
        decode(bytes(data))
    first, last = encode_frame(1, Select(has_key=True), bytes(80_000))
    changed = last[:-8] + b"x" + last[-7:]
    with pytest.raises(RemoteProtocolError, match="fails its checksum"):
        decode(first, changed)


def test_an_error_stays_for_ever() -> None:
    decoder = FrameDecoder()
    for data in (b"x" * HEADER_BYTES, encode_frame(1, Get("a"))[0]):
        with pytest.raises(RemoteProtocolError, match="not a frame") as caught:
            list(decoder.feed(data))
        assert "something else than asynckv" in caught.value.hint


def test_what_is_too_long_to_send_is_our_own_error() -> None:
    with pytest.raises(LocalProtocolError, match="body of Get has 11 bytes"):
        encode_frame(1, Get("a"), bytes(11), limits=Limits(max_body_bytes=10))
    with pytest.raises(LocalProtocolError, match="Get takes"):
        encode_frame(1, Get("abc"), limits=Limits(max_control_bytes=10))


def test_what_is_just_short_enough_is_sent_and_taken() -> None:
    longest = Limits(max_control_bytes=len(msgspec.msgpack.encode(Get("abc"))))
    assert len(encode_frame(1, Get("abc"), limits=longest)) == 1
    assert len(encode_frame(1, Get("abc"), bytes(70_000), limits=longest)) == 2
    assert decode(encode_frame(1, Get("abc"))[0], limits=longest)
    with pytest.raises(LocalProtocolError, match="Get takes 16 bytes of control"):
        encode_frame(1, Get("abcd"), limits=longest)
    with pytest.raises(RemoteProtocolError, match="16 bytes of control"):
        decode(encode_frame(1, Get("abcd"))[0], limits=longest)
    with pytest.raises(LocalProtocolError, match="body of Get has 16777217 bytes"):
        encode_frame(1, Get("abc"), bytes(2**24 + 1), limits=longest)
    ten = Limits(max_body_bytes=10)
    assert decode(encode_frame(1, Get("a"), bytes(10), limits=ten)[0], limits=ten)


def test_frames_with_nested_values_survive_the_wire() -> None:
    identity = values.PeerIdentity("a", "b")
    examples: list[Frame] = [
        frames.Hello(1, 0, identity, Limits(), ("inline",), 2),
        frames.Contains(("a", "b")),
        frames.Failure("EntryTooLarge", "no", nbytes=3, max_bytes=2),
        frames.Nack(b"t" * 16, reached=True),
    ]
    for example in examples:
        assert decode(encode_frame(2, example)[0]) == [(2, example, b"")]


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
