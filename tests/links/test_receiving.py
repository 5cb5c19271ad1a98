from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest

from asynckv.errors import ChecksumError, RemoteProtocolError
from asynckv.links.receiving import Reception
from asynckv.protocol.frames import Done


class Payload:
    """A payload transport that only remembers what it was told."""

    def __init__(self) -> None:
        self.done: list[Callable[[bytes, BaseException | None], None]] = []
        self.stopped: list[int] = []

    def receive(self, transfer: int, part: int, target: memoryview, done: Any) -> None:
        self.done.append(done)

    def stop(self, transfer: int) -> None:
        self.stopped.append(transfer)


class Sink:
    """Where two parts go, and what was said of them."""

    def __init__(self) -> None:
        self.payload = Payload()
        self.progress = self
        self.expected: set[int] = set()
        self.verified: list[tuple[int, bytes]] = []
        self.errors: list[Exception] = []
        targets = [memoryview(bytearray(8)), memoryview(bytearray(8))]
        self.reception = Reception(self, 7, targets, self)  # type: ignore[arg-type]
        self.reception.begin()

    def expect(self, transfer: int) -> None:
        self.expected.add(transfer)

    def forget(self, transfer: int) -> None:
        self.expected.discard(transfer)

    def part_verified(self, index: int, digest: bytes) -> None:
        self.verified.append((index, digest))

    def reception_failed(self, error: Exception) -> None:
        self.errors.append(error)


def test_its_bytes_are_expected_until_all_have_landed_or_nobody_wants_them() -> None:
    sink, stopped = Sink(), Sink()
    assert sink.expected == {7}
    sink.payload.done[1](b"digest", None)
    assert sink.expected == {7}
    sink.payload.done[0](b"digest", None)
    sink.reception.expect()
    stopped.reception.stop()
    stopped.reception.expect()
    assert not sink.expected and not stopped.expected


def test_what_is_not_whole_yet_is_not_expected() -> None:
    sink = Sink()
    sink.expected.clear()
    sink.reception.begin(whole=False)
    assert not sink.expected


def test_a_part_counts_when_it_has_landed_and_its_digest_agrees() -> None:
    sink = Sink()
    sink.payload.done[1](b"digest", None)
    assert not sink.verified
    sink.reception.on_done(Done(7, 1, b"digest"))
    sink.reception.on_done(Done(7, 0, b"other"))
    assert sink.verified == [(1, b"digest")]
    sink.payload.done[0](b"other", None)
    assert sink.verified == [(1, b"digest"), (0, b"other")]


def test_other_bytes_than_were_sent_fail_and_stop_the_transfer() -> None:
    sink = Sink()
    sink.payload.done[0](b"landed", None)
    sink.reception.on_done(Done(7, 0, b"sent"))
    assert not sink.verified
    assert isinstance(sink.errors[0], ChecksumError)
    assert sink.payload.stopped == [7]


@pytest.mark.parametrize("part", [0, 2])
def test_a_part_that_was_sent_or_does_not_exist_is_a_lie(part: int) -> None:
    sink = Sink()
    sink.reception.on_done(Done(7, 0, b""))
    with pytest.raises(RemoteProtocolError, match="makes no sense"):
        sink.reception.on_done(Done(7, part, b""))


def test_a_stopped_transfer_tells_nothing_more() -> None:
    sink = Sink()
    sink.reception.stop()
    sink.payload.done[0](b"d", None)
    sink.reception.on_done(Done(7, 0, b"d"))
    assert not sink.verified
    assert not sink.errors


def test_an_error_of_the_transport_is_left_to_the_link() -> None:
    sink = Sink()
    sink.payload.done[0](b"", ConnectionError())
    sink.reception.on_done(Done(7, 0, b""))
    assert not sink.verified
    assert not sink.errors


@pytest.mark.parametrize("end", ["whole", "stopped", "other"])
def test_it_forgets_who_owns_the_memory_when_nothing_more_is_to_be_told(
    end: str,
) -> None:
    link, owner = Sink(), Sink()
    targets = [memoryview(bytearray(8))]
    reception = Reception(link, 8, targets, owner)  # type: ignore[arg-type]
    reception.begin()
    is_gone = weakref.ref(owner)
    owner.payload.done.clear()  # which keep its own reception, and so itself
    if end == "stopped":
        reception.stop()
    else:
        link.payload.done[-1](b"digest", None)
        reception.on_done(Done(8, 0, b"digest" if end == "whole" else b"other"))
    del owner.reception, owner.progress, owner
    assert is_gone() is None
