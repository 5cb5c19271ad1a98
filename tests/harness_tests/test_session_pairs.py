from __future__ import annotations

import pytest

from asynckv.errors import RemoteProtocolError
from asynckv.protocol.frames import Ping, Pong
from asynckv.protocol.session import Opened
from harness.session_pairs import ask, far, hear, near, pump


def test_what_one_side_asks_reaches_the_other() -> None:
    a, b = near(), far()
    stream = ask(a)
    (event,) = pump(a, b)
    assert isinstance(event, Opened) and event.stream == stream == 1
    assert not a.outbox


def test_each_side_may_ask() -> None:
    assert (ask(near()), ask(far())) == (1, 2)


def test_a_frame_is_heard_though_nobody_has_said_it() -> None:
    a, b = near(), far()
    hear(b, 0, Ping(7))
    pump(b, a)
    with pytest.raises(RemoteProtocolError, match="on a stream"):
        hear(b, 1, Pong(7))
