from __future__ import annotations

from asynckv.buffers.remote.connection import Backoff


def test_the_first_attempt_is_made_at_once_and_the_pauses_grow() -> None:
    backoff = Backoff()
    pauses = [backoff.next_pause_s() for _ in range(8)]
    longest = [0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    for pause_s, longest_s in zip(pauses, longest, strict=True):
        assert longest_s / 2 <= pause_s <= longest_s


def test_after_something_of_use_it_begins_anew() -> None:
    backoff = Backoff()
    for _ in range(3):
        backoff.next_pause_s()
    backoff.reset()
    assert backoff.next_pause_s() == 0
    assert 0 < backoff.next_pause_s() <= 0.05
