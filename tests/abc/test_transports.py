from __future__ import annotations

from asynckv.abc import PayloadTransport


def test_a_transport_that_cannot_tell_says_that_nothing_has_landed() -> None:
    assert PayloadTransport.landed_bytes.__get__(object())(1) == 0
