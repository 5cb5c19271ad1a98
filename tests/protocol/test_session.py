from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from asynckv.errors import LocalProtocolError, RemoteProtocolError
from asynckv.protocol.codec import BODY_PART_BYTES, encode_frame
from asynckv.protocol.frames import (
    Accepted,
    Ack,
    Cancel,
    Cancelled,
    Failure,
    Frame,
    Get,
    Goodbye,
    Insert,
    OpenPipe,
    Ping,
    Pong,
    Refuse,
    Result,
    Select,
    Took,
)
from asynckv.protocol.limits import Unfinished
from asynckv.protocol.session import (
    Came,
    Event,
    Farewell,
    Nothing,
    Opened,
    Refused,
    Session,
)
from asynckv.protocol.transfer_frames import Grant
from asynckv.protocol.values import Limits
from harness.session_pairs import ask, far, hear, near, pump

LONG = 3 * BODY_PART_BYTES


def owners(session: Session[str]) -> list[str]:
    """Who hears of the end of its streams, now."""
    session.end_streams()
    return list(session.take_lost())


def ask_twice(session: Session[str]) -> int:
    """Open two streams, and return the second."""
    ask(session, "other")
    return ask(session)


SIDES = pytest.mark.parametrize(("asking", "asked"), [(near, far), (far, near)])

Side = Callable[..., Session[str]]


def took(session: Session[str], stream: int) -> Came[str]:
    session.send(stream, Took(b"t"))
    return Came("answerer", Took(b"t"), b"")


@SIDES
def test_it_tells_whether_a_request_of_its_own_has_ended(
    asking: Side, asked: Side
) -> None:
    source, sink = asking(), asked()
    stream = ask_twice(source)
    pump(source, sink)
    assert not source.was_answered
    sink.send(stream, Result(1))
    pump(sink, source)
    assert source.was_answered and not sink.was_answered


def test_what_is_packed_is_heard_as_what_is_sent_and_nothing_of_what_is_over() -> None:
    a, b = near(), far()
    stream = ask(a)
    pump(a, b)
    b.attach(stream, "answerer")
    packed = a.pack(stream, Ack(b"t"), b"body")
    assert list(b.receive(packed)) == [Came("answerer", Ack(b"t"), b"body")]
    assert a.pack(stream + 2, Ack(b"t"), b"") == b""


def test_the_peer_comes_to_a_request_before_the_end_of_another() -> None:
    a, b = near(), far()
    ask(a)
    pump(a, b)
    b.attach(1, "answerer")
    end = took(a, 1)
    ask(a)
    assert pump(a, b) == [Opened(3, Get("k"), b""), end]


def test_no_peer_sees_more_streams_than_there_may_be() -> None:
    limits = Limits(max_streams=2)
    a, b = near(limits), far(limits)
    for stream in (ask(a), ask(a)):
        pump(a, b)
        b.attach(stream, "answerer")
    end = took(a, 1)
    ask(a)
    assert pump(a, b) == [end, Opened(5, Get("k"), b"")]
    with pytest.raises(LocalProtocolError):
        ask(a)


def test_a_request_and_its_answer_reach_their_owners() -> None:
    a, b = near(), far()
    a.open("asker", Select(has_key=True), b"key")
    assert pump(a, b) == [Opened(1, Select(has_key=True), b"key")]
    b.attach(1, "answerer")
    assert b.send(1, Grant(4))
    assert pump(b, a) == [Came("asker", Grant(4), b"")]
    a.send(1, Ack(b"t"))
    assert pump(a, b) == [Came("answerer", Ack(b"t"), b"")]


@SIDES
@pytest.mark.parametrize(
    "final", [Accepted(), Result(), Failure("KeyError", ""), Cancelled()]
)
def test_a_stream_is_over_with_its_final_frame_on_both_sides(
    final: Frame, asking: Side, asked: Side
) -> None:
    a, b = asking(), asked()
    stream = ask_twice(a)
    pump(a, b)
    b.attach(stream, "answerer")
    assert b.send(stream, final, b"body")
    assert pump(b, a) == [Came("asker", final, b"body")]
    assert (owners(a), owners(b)) == (["other"], [])
    assert not a.send(stream, Cancel())
    assert not b.send(stream, Grant(1))


@SIDES
def test_a_stream_is_over_when_its_requester_took_what_was_offered(
    asking: Side, asked: Side
) -> None:
    a, b = asking(), asked()
    stream = ask_twice(a)
    pump(a, b)
    b.attach(stream, "answerer")
    assert a.send(stream, Took(b"t"))
    assert pump(a, b) == [Came("answerer", Took(b"t"), b"")]
    assert (owners(a), owners(b)) == (["other"], [])
    assert not b.send(stream, Accepted())


@SIDES
def test_who_says_more_still_hears_the_answer(asking: Side, asked: Side) -> None:
    a, b = asking(), asked()
    stream = ask_twice(a)
    assert a.send(stream, Cancel())
    pump(a, b)
    assert b.send(stream, Cancelled())
    assert pump(b, a) == [Came("asker", Cancelled(), b"")]


@SIDES
def test_only_the_side_that_asks_takes(asking: Side, asked: Side) -> None:
    a = asking()
    stream = ask_twice(a)
    with pytest.raises(RemoteProtocolError, match="Took from the side that answers"):
        hear(a, stream, Took(b"t"))


@SIDES
def test_nothing_is_kept_of_streams_that_are_over(asking: Side, asked: Side) -> None:
    a, b = asking(), asked()
    for frame in (Get("k"), OpenPipe()):
        stream = a.open("asker", frame)
        pump(a, b)
        b.send(stream, Failure("WrongRole", ""))
        pump(b, a)
    a.close(stream := ask(a))
    hear(a, stream, Accepted())
    a.keep_ending("asker")
    pump(a, b)
    b.send(stream, Accepted())
    for side in (a, b):
        assert not (side._streams or side._pipes or side._ids._skipped)


@SIDES
def test_what_a_side_answers_is_counted_apart_from_what_it_asks(
    asking: Side, asked: Side
) -> None:
    a, b = asking(), asked()
    stream = ask(a)
    assert a.outbox.answer_bytes == 0 < a.outbox.nbytes
    pump(a, b)
    b.send(stream, Grant(1))
    assert b.outbox.answer_bytes == b.outbox.nbytes > 0


def test_who_closes_while_another_is_told_of_the_end_hears_nothing_of_it() -> None:
    a = near()
    ask(a, "first")
    second = ask(a, "second")
    a.end_streams()
    lost = a.take_lost()
    assert next(lost) == "first"
    a.close(second)
    assert list(lost) == []


def test_who_closes_its_stream_after_the_end_hears_nothing_of_it() -> None:
    a = near()
    first, second = ask(a, "first"), ask(a, "second")
    a.end_streams()
    a.close(first)
    a.close(second + 2)
    assert not a.send(second, Cancel())
    assert list(a.take_lost()) == ["second"]


def test_who_cannot_take_the_last_frame_hears_of_the_end() -> None:
    a = near()
    hearing = a.receive(encode_frame(ask(a, "first"), Accepted())[0])
    next(hearing)
    a.keep_ending("first")
    a.end_streams()
    assert list(a.take_lost()) == ["first"]


@pytest.mark.parametrize("closes", [True, False])
def test_who_took_the_last_frame_hears_no_more(closes: bool) -> None:
    a = near()
    stream = ask(a, "first")
    hearing = a.receive(encode_frame(stream, Accepted())[0])
    next(hearing)
    if closes:
        a.close(stream)
    else:
        assert list(hearing) == []
    a.keep_ending("first")
    assert owners(a) == []


def test_a_forgotten_owner_hears_nothing_of_the_end() -> None:
    a = near()
    a.close(ask(a))
    assert owners(a) == []


@SIDES
def test_frames_for_a_stream_that_is_over_are_ignored(
    asking: Side, asked: Side
) -> None:
    a, b = asking(), asked()
    stream = ask_twice(a)
    pump(a, b)
    b.send(stream, Accepted())
    a.send(stream, Cancel())
    assert pump(a, b) == [Nothing()]
    pump(b, a)
    hear(a, stream, Grant(1))


@SIDES
def test_a_forgotten_stream_is_ignored_and_counts_until_its_end(
    asking: Side, asked: Side
) -> None:
    a, b = asking(Limits(max_streams=2)), asked()
    stream = ask_twice(a)
    pump(a, b)
    a.close(stream)
    with pytest.raises(LocalProtocolError, match="2 requests are open") as caught:
        ask(a)
    assert "raise Limits.max_streams" in caught.value.hint
    b.send(stream, Grant(1))
    b.send(stream, Accepted())
    assert pump(b, a) == [Nothing(), Nothing()]
    assert ask(a) == stream + 2
    with pytest.raises(LocalProtocolError, match="2 requests are open"):
        ask(a)


def test_a_pipe_goes_on_after_what_ends_other_streams() -> None:
    a, b = near(), far()
    a.open("near end", OpenPipe())
    pump(a, b)
    b.attach(1, "far end")
    b.send(1, Accepted())
    a.send(1, Accepted())
    assert pump(b, a) == [Came("near end", Accepted(), b"")]
    assert pump(a, b) == [Came("far end", Accepted(), b"")]
    b.send(1, Failure("WrongRole", ""))
    pump(b, a)
    assert (owners(a), owners(b)) == ([], [])


def test_closing_a_pipe_forgets_it() -> None:
    a = near(Limits(max_streams=1))
    a.open("near end", OpenPipe())
    a.close(1)
    assert not a._pipes
    assert ask(a) == 3


def test_an_opened_stream_that_nobody_attached_to_is_ignored() -> None:
    a, b = near(), far()
    stream = ask(a)
    pump(a, b)
    a.send(stream, Cancel())
    assert pump(a, b) == [Nothing()]


def test_the_side_that_asks_cannot_end_its_stream() -> None:
    b = far()
    hear(b, 1, Get("k"))
    with pytest.raises(RemoteProtocolError, match="Accepted from the side that asks"):
        hear(b, 1, Accepted())


def test_a_link_frame_has_no_body() -> None:
    with pytest.raises(RemoteProtocolError, match="Ping with a body"):
        hear(far(), 0, Ping(1), b"body")


def test_a_ping_is_answered_and_its_answer_noticed() -> None:
    a, b = near(), far()
    assert a.unanswered_ping is None
    a.ping(9)
    assert a.unanswered_ping == 9
    assert pump(a, b) == [Nothing()]
    assert pump(b, a) == [Nothing()]
    assert a.unanswered_ping is None


def test_the_peers_pings_are_counted() -> None:
    a, b = near(), far()
    counts = [b.pinged_count]
    for nonce in (1, 2):
        a.ping(nonce)
        pump(a, b)
        counts.append(b.pinged_count)
    assert counts == [0, 1, 2]


def test_an_unknown_pong_is_ignored() -> None:
    a = near()
    a.ping(9)
    hear(a, 0, Pong(8))
    assert a.unanswered_ping == 9


def test_a_goodbye_comes_after_all_else_and_ends_the_hearing() -> None:
    a, b = near(), far()
    a.say_goodbye("done")
    ask(a)
    assert pump(a, b) == [Opened(1, Get("k"), b""), Farewell("done")]
    hear(b, 2, Goodbye())


@pytest.mark.parametrize(("reason", "heard"), [("", ""), ("x" * 3000, "x" * 2048)])
def test_a_goodbye_says_why_within_bounds(reason: str, heard: str) -> None:
    a, b = near(), far()
    a.say_goodbye(reason) if reason else a.say_goodbye()
    assert pump(a, b) == [Farewell(heard)]


def test_who_refused_hears_no_more() -> None:
    b = far()
    b.refuse(RemoteProtocolError("no"))
    assert list(b.receive(b"no frame")) == []


@pytest.mark.parametrize("last", [Goodbye(), Refuse("PeerLost", "no")])
def test_nothing_is_heard_after_the_last_word(last: Frame) -> None:
    b = far()
    hear(b, 0, last)
    assert list(b.receive(b"no frame")) == []
    b = far()
    data = encode_frame(0, last)[0] + encode_frame(2, Grant(1))[0]
    assert len(list(b.receive(data))) == 1


def test_a_refusal_is_the_last_word() -> None:
    a, b = near(), far()
    ask(a)
    a.refuse(RemoteProtocolError("too loud"))
    events = pump(a, b)
    assert [type(event) for event in events] == [Refused]
    assert isinstance(events[0], Refused)
    assert isinstance(events[0].error, LocalProtocolError)


def test_a_hang_up_is_clean_only_between_frames() -> None:
    b = far()
    assert b.is_between_frames
    list(b.receive(encode_frame(1, Get("k"))[0][:-1]))
    assert not b.is_between_frames


def test_what_comes_in_the_middle_of_a_body_is_heard_before_it() -> None:
    a, b = near(), far()
    ask(a)
    pump(a, b)
    b.attach(1, "answerer")
    a.open("asker", Get("long"), bytes(LONG))
    assert not list(b.receive(a.outbox.take(1))) and not b.is_between_frames
    a.ping(7)
    a.send(1, Ack(b"t"))
    heard = [Nothing(), Came("answerer", Ack(b"t"), b""), took(a, 1)]
    assert pump(a, b) == [*heard, Opened(3, Get("long"), bytes(LONG))]
    pump(b, a)
    assert a.unanswered_ping is None


def test_half_a_body_takes_no_room_from_other_links_when_its_own_has_ended() -> None:
    whole, b = Unfinished(LONG), far()
    b.share(whole, lambda error: None)
    list(b.receive(encode_frame(1, Get("long"), bytes(LONG))[0]))
    assert whole.nbytes == BODY_PART_BYTES
    b.end_streams()
    assert not whole.nbytes


def test_what_is_too_long_opens_nothing() -> None:
    a = near(Limits(max_body_bytes=10))
    with pytest.raises(LocalProtocolError):
        a.open("asker", Get("k"), bytes(11))
    assert not a.outbox
    assert ask(a) == 1


def _recording() -> bytes:
    frames: list[tuple[int, Frame, bytes]] = [
        (1, Select(has_key=True), bytes(64)),
        (0, Ping(3), b""),
        (3, Insert("e", 1, inline=True), b"contents"),
        (1, Cancel(), b""),
        (3, Ack(b"t" * 16), b""),
        (0, Goodbye("enough"), b""),
    ]
    return b"".join(part for frame in frames for part in encode_frame(*frame))


RECORDED = _recording()


def replay(*pieces: bytes) -> list[Event[str]]:
    b = far()
    events = []
    for piece in pieces:
        for event in b.receive(piece):
            events.append(event)
            if isinstance(event, Opened):
                b.attach(event.stream, f"owner of {event.stream}")
    return events


@given(st.lists(st.integers(0, len(RECORDED)), max_size=20))
def test_any_chunking_gives_the_same_events(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(RECORDED)]
    pieces = [RECORDED[a:b] for a, b in itertools.pairwise(edges)]
    assert replay(*pieces) == replay(RECORDED)


def test_every_cut_gives_the_events_before_it() -> None:
    whole = replay(RECORDED)
    for cut in range(len(RECORDED)):
        events = replay(RECORDED[:cut])
        assert events == whole[: len(events)]


def test_each_flipped_bit_gives_a_documented_error_or_events() -> None:
    for bit in range(len(RECORDED) * 8):
        changed = bytearray(RECORDED)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            replay(bytes(changed))
        except RemoteProtocolError as exc:
            assert str(exc)


def test_shuffled_frames_give_a_documented_error_or_events() -> None:
    random_ = random.Random(1)
    frames = [encode_frame(s, f)[0] for s in range(4) for f in (Get("k"), Ack(b""))]
    frames += [encode_frame(0, Refuse("x", "y"))[0], encode_frame(0, Pong(1))[0]]
    for _ in range(300):
        random_.shuffle(frames)
        try:
            replay(*frames)
        except RemoteProtocolError as exc:
            assert str(exc)


def test_what_the_peer_asks_and_takes_back_is_counted() -> None:
    a, b = near(), far()
    for answer in (Cancelled(), Cancelled(committed=True), Result(1)):
        stream = ask(a)
        a.send(stream, Cancel())
        pump(a, b)
        b.send(stream, answer)
        pump(b, a)
    assert (b.opened_count, b.cancelled_count) == (3, 2)
    assert (a.opened_count, a.cancelled_count) == (0, 0)


def test_events_are_values() -> None:
    assert Opened(1, Get("k"), b"") == Opened(1, Get("k"), b"")
    assert Came("owner", Grant(1), b"") != Came("other", Grant(1), b"")
    assert Farewell("enough").reason == "enough"
    assert str(Refused(ValueError("no")).error) == "no"  # type: ignore[arg-type]


def test_who_heard_of_a_frame_and_keeps_it_is_collected() -> None:
    class Owner:
        heard: object = None

    owner = Owner()
    owner.heard = Came(owner, Grant(1), b"")
    is_gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert is_gone() is None
