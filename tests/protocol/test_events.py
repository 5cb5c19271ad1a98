from __future__ import annotations

import gc
import weakref

from asynckv.protocol.frames import Get
from asynckv.protocol.session import Came, Farewell, Opened, Refused
from asynckv.protocol.transfer_frames import Grant


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
