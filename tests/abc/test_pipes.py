from __future__ import annotations

from collections.abc import AsyncIterator

from asynckv.abc import KVPipe


def test_a_pipe_is_read_by_async_for() -> None:
    assert issubclass(KVPipe, AsyncIterator)
