from __future__ import annotations

from asynckv.protocol.events import Came, Farewell, Opened, Refused
from asynckv.protocol.frames import Get, Grant


def test_events_are_values() -> None:
    assert Opened(1, Get("k"), b"") == Opened(1, Get("k"), b"")
    assert Came("owner", Grant(1), b"") != Came("other", Grant(1), b"")
    assert Farewell("enough").reason == "enough"
    assert str(Refused(ValueError("no")).error) == "no"  # type: ignore[arg-type]
