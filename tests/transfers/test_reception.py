from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest

from asynckv.errors import ChecksumError, RemoteProtocolError
from asynckv.protocol.transfer_frames import Sent
from asynckv.tensors.cuda import DeviceMemory
from asynckv.transfers.reception import Reception


class Moving:
    """A payload transport, or a route, that only remembers what it was told."""

    def __init__(self) -> None:
        self.done: list[Callable[[bytes, BaseException | None], None]] = []
        self.stopped: list[int] = []
        self.expected: set[int] = set()
        self.progress: Any = self

    def receive(self, transfer: int, part: int, target: object, done: Any) -> None:
        self.done.append(done)

    def stop(self, transfer: int) -> None:
        self.stopped.append(transfer)

    def expect(self, transfer: int) -> None:
        self.expected.add(transfer)

    def forget(self, transfer: int) -> None:
        self.expected.discard(transfer)


class Sink:
    """Where the part goes, and what was said of it."""

    def __init__(self, *, is_routed: bool = False) -> None:
        self.payload = Moving()
        self.progress = self.payload
        self.route = Moving()
        self.verified: list[bool] = []
        self.errors: list[Exception] = []
        self.reception = Reception(self, 7, self)  # type: ignore[arg-type]
        if is_routed:
            place = DeviceMemory(4096, 8, 0)
            self.reception.begin_by(self.route, place)  # type: ignore[arg-type]
        else:
            self.reception.begin(memoryview(bytearray(8)))

    def part_verified(self) -> None:
        self.verified.append(True)

    def reception_failed(self, error: Exception) -> None:
        self.errors.append(error)


def test_its_bytes_are_expected_until_they_have_landed_or_nobody_wants_them() -> None:
    landed, stopped = Sink(), Sink()
    assert landed.payload.expected == {7}
    landed.payload.done[0](b"digest", None)
    stopped.reception.stop()
    stopped.reception.stop()
    assert not landed.payload.expected and not stopped.payload.expected


@pytest.mark.parametrize("lands_first", [True, False])
def test_a_part_counts_when_it_has_landed_and_its_digest_agrees(
    lands_first: bool,
) -> None:
    sink = Sink()
    if lands_first:
        sink.payload.done[0](b"digest", None)
    assert not sink.verified
    sink.reception.on_sent(Sent(7, 0, b"digest"))
    if not lands_first:
        assert not sink.verified
        sink.payload.done[0](b"digest", None)
    assert sink.verified == [True]


def test_other_bytes_than_were_sent_fail_and_stop_the_transfer() -> None:
    sink = Sink()
    sink.payload.done[0](b"landed", None)
    sink.reception.on_sent(Sent(7, 0, b"sent"))
    assert not sink.verified and isinstance(sink.errors[0], ChecksumError)
    assert sink.payload.stopped == [7]


@pytest.mark.parametrize("part", [0, 1])
def test_a_part_that_was_sent_or_does_not_exist_is_a_lie(part: int) -> None:
    sink = Sink()
    sink.reception.on_sent(Sent(7, 0, b""))
    with pytest.raises(RemoteProtocolError, match="makes no sense"):
        sink.reception.on_sent(Sent(7, part, b""))


def test_a_stopped_transfer_tells_nothing_more() -> None:
    sink = Sink()
    sink.reception.stop()
    sink.payload.done[0](b"d", None)
    sink.reception.on_sent(Sent(7, 0, b"d"))
    assert not sink.verified and not sink.errors


def test_an_error_of_the_transport_is_left_to_the_link() -> None:
    sink = Sink()
    sink.payload.done[0](b"", ConnectionError())
    sink.reception.on_sent(Sent(7, 0, b""))
    assert not sink.verified and not sink.errors


def test_what_comes_by_a_route_counts_when_that_says_so() -> None:
    sink = Sink(is_routed=True)
    assert sink.route.expected == {7} and not sink.payload.done
    with pytest.raises(RemoteProtocolError, match="makes no sense"):
        sink.reception.on_sent(Sent(7, 0, b""))
    sink.route.done[0](b"digest", None)
    assert sink.verified == [True] and not sink.route.expected


def test_an_error_of_a_route_is_one_of_the_transfer_alone() -> None:
    sink, late = Sink(is_routed=True), Sink(is_routed=True)
    sink.route.done[0](b"", OSError("gone"))
    assert isinstance(sink.errors[0], OSError) and sink.route.stopped == [7]
    late.reception.stop()
    late.route.done[0](b"", OSError("gone"))
    late.route.done[0](b"", None)
    assert not late.errors and not late.verified


@pytest.mark.parametrize("end", ["whole", "stopped", "other"])
def test_it_forgets_who_owns_the_memory_when_nothing_more_is_to_be_told(
    end: str,
) -> None:
    link, owner = Sink(), Sink()
    reception = Reception(link, 8, owner)  # type: ignore[arg-type]
    reception.begin(memoryview(bytearray(8)))
    is_gone = weakref.ref(owner)
    owner.payload.done.clear()  # which keep its own reception, and so itself
    if end == "stopped":
        reception.stop()
    else:
        link.payload.done[-1](b"digest", None)
        reception.on_sent(Sent(8, 0, b"digest" if end == "whole" else b"other"))
    del owner.reception, owner
    assert is_gone() is None
