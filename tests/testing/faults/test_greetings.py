from __future__ import annotations

import pytest

from asynckv.protocol.codec import FrameDecoder, encode_frame
from asynckv.protocol.frames import Attach, Frame, Hello, Ping, Welcome
from asynckv.protocol.values import Limits, PeerIdentity
from asynckv.testing.faults.greetings import Greeting

ME = PeerIdentity("me", "1")
HELLO = Hello(1, 0, ME, Limits(), ("inline",), 2)
WELCOME = Welcome(1, 0, ME, Limits(), "inline", 2, b"token")


def encoded(frame: Frame) -> bytes:
    return encode_frame(0, frame)[0]


@pytest.mark.parametrize(
    ("frame", "kind"),
    [(HELLO, "control"), (WELCOME, "control"), (Attach(b"t", 0), "lanes")],
)
@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_a_greeting_tells_the_kind_once_it_is_whole(
    frame: Frame, kind: str, step: int
) -> None:
    greeting, data = Greeting(), encoded(frame) + b"and what follows"
    passed = [greeting.feed(data[i : i + step]) for i in range(0, len(data), step)]
    assert b"".join(passed) == data
    assert greeting.kind == kind


def test_nothing_of_a_greeting_passes_before_it_is_whole() -> None:
    greeting, data = Greeting(), encoded(HELLO)
    assert greeting.feed(data[:-1]) == b""
    assert greeting.kind == ""
    assert greeting.rest() == data[:-1]
    assert greeting.feed(b"anything") == b"anything"


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n",
        encoded(Ping(1)),
        encode_frame(0, HELLO, b"body")[0],
        encoded(HELLO)[:-3] + b"???",
        b"\x16\x03\x01" + bytes(200),
        b"AKV2",
    ],
    ids=["http", "ping", "a body", "undecodable", "tls", "short"],
)
def test_what_is_no_greeting_passes_as_it_came(data: bytes) -> None:
    greeting = Greeting(heartbeat_ms=1)
    assert greeting.feed(data) + greeting.rest() == data
    assert greeting.kind == ""


@pytest.mark.parametrize("frame", [HELLO, WELCOME])
def test_the_heartbeat_is_quickened(frame: Hello | Welcome) -> None:
    data = Greeting(heartbeat_ms=50).feed(encoded(frame) + encoded(Ping(1)))
    (_, first, _), (_, second, _) = FrameDecoder().feed(data)
    assert isinstance(first, type(frame))
    assert first.limits == Limits(heartbeat_ms=50)
    assert first.identity == ME
    assert second == Ping(1)


def test_a_heartbeat_that_is_quick_stays() -> None:
    data = encoded(HELLO)
    assert Greeting(heartbeat_ms=5000).feed(data) == data


def test_what_cannot_become_a_greeting_passes_at_once() -> None:
    assert Greeting().feed(b"AK") == b""
    assert Greeting().feed(b"AKA") == b"AKA"
