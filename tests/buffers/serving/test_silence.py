from __future__ import annotations

import pytest

from asynckv.buffers.serving import service
from asynckv.buffers.serving.service import SILENCE_S, Silence
from asynckv.errors import EntryAborted
from asynckv.testing.blocked import until


class Listener:
    """What has come of each transfer, and what was told."""

    def __init__(self) -> None:
        self.landed: dict[int, int] = {}
        self.told: list[Exception] = []
        self.is_working = False
        self.silence = Silence(
            lambda: dict(self.landed),
            self.told.append,
            is_working=lambda: self.is_working,
        )


async def test_a_writer_that_says_nothing_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "SILENCE_S", 0.01)
    listener = Listener()
    await until(lambda: bool(listener.told))
    (error,) = listener.told
    assert isinstance(error, EntryAborted) and error.reason == "producer"


async def test_a_tensor_that_grows_is_no_silence_one_that_stands_still_is() -> None:
    listener = Listener()
    for listener.landed in ({1: 5}, {1: 7}, {1: 7, 2: 1}):
        listener.silence._fall_silent()
    assert not listener.told
    listener.silence._fall_silent()
    assert len(listener.told) == 1
    listener.silence.stop()


async def test_what_is_promised_and_has_no_byte_is_silence() -> None:
    listener = Listener()
    listener.landed = {1: 0}
    listener.silence._fall_silent()
    assert len(listener.told) == 1
    listener.silence.stop()


async def test_while_this_side_works_nobody_is_silent() -> None:
    listener = Listener()
    for listener.is_working in (True, True, False):
        assert not listener.told
        listener.silence._fall_silent()
    assert len(listener.told) == 1
    listener.silence.stop()


async def test_who_is_heard_has_the_whole_time_again() -> None:
    silence = Listener().silence
    first = silence._timer
    silence.hear()
    assert first.cancelled() and not silence._timer.cancelled()
    assert silence._timer.when() >= silence._loop.time() + SILENCE_S - 1
    silence.stop()


async def test_what_is_stopped_listens_no_more_whoever_is_heard() -> None:
    silence = Listener().silence
    silence.stop()
    silence.hear()
    assert silence._timer.cancelled()
