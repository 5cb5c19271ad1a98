from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest

from asynckv.errors import ChecksumError, RemoteProtocolError
from asynckv.protocol.digests import digest_of
from asynckv.protocol.transfer_frames import Done, Riders
from asynckv.transfers.manifest import EAGER_NBYTES
from asynckv.transfers.reception import Reception


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

    def __init__(self, *sizes: int, digest: str = "full") -> None:
        self.payload = Payload()
        self.progress = self
        self.digest = digest
        self.noted_bytes = 0
        self.expected: set[int] = set()
        self.verified: list[tuple[int, bytes]] = []
        self.errors: list[Exception] = []
        self.targets = [memoryview(bytearray(size)) for size in sizes or (8, 8)]
        self.reception = Reception(
            self,  # type: ignore[arg-type]
            7,
            self.targets,
            self,
            has_riders=bool(sizes),
        )
        self.reception.begin()

    def expect(self, transfer: int) -> None:
        self.expected.add(transfer)

    def forget(self, transfer: int) -> None:
        self.expected.discard(transfer)

    def note(self, nbytes: int) -> None:
        self.noted_bytes += nbytes

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


def riders(*parts: int, sizes: tuple[int, ...]) -> tuple[Riders, bytes]:
    pieces = [bytes([part]) * size for part, size in zip(parts, sizes, strict=True)]
    return Riders(7, parts, tuple(map(digest_of, pieces))), b"".join(pieces)


def test_small_parts_ride_and_large_ones_take_a_lane() -> None:
    sink = Sink(8, EAGER_NBYTES + 1, EAGER_NBYTES, 0)
    assert len(sink.payload.done) == 1
    frame, body = riders(2, 3, 0, sizes=(EAGER_NBYTES, 0, 8))
    sink.reception.on_parts(frame, body)
    assert [index for index, _ in sink.verified] == [2, 3, 0]
    assert bytes(sink.targets[2]) == bytes([2]) * EAGER_NBYTES
    assert sink.noted_bytes == len(body) and sink.expected == {7}
    sink.payload.done[0](b"digest", None)
    sink.reception.on_parts(Done(7, 1, b"digest"), b"")
    assert len(sink.verified) == 4 and not sink.expected


def test_where_a_link_carries_no_digests_riders_have_none() -> None:
    sink = Sink(8, 8, digest="off")
    sink.reception.on_riders(Riders(7, (0, 1)), bytes(16))
    assert sink.verified == [(0, b""), (1, b"")]


def test_a_rider_with_other_bytes_than_were_sent_ends_the_transfer() -> None:
    sink = Sink(8, 8, 8)
    frame, body = riders(0, 1, 2, sizes=(8, 8, 8))
    sink.reception.on_riders(frame, body[:8] + b"x" + body[9:])
    assert [index for index, _ in sink.verified] == [0]
    assert isinstance(sink.errors[0], ChecksumError)
    assert sink.payload.stopped == [7] and not any(sink.targets[2])


@pytest.mark.parametrize(
    ("parts", "nbytes"),
    [((0, 0), 16), ((1,), 8), ((2,), EAGER_NBYTES + 1), ((3,), 8), ((0,), 7)],
    ids=["twice", "came before", "takes a lane", "does not exist", "too short"],
)
def test_riders_that_make_no_sense_end_the_link(
    parts: tuple[int, ...], nbytes: int
) -> None:
    sink = Sink(8, 8, EAGER_NBYTES + 1)
    sink.reception.on_riders(*riders(1, sizes=(8,)))
    with pytest.raises(RemoteProtocolError):
        sink.reception.on_riders(Riders(7, parts), bytes(nbytes))
    assert not any(sink.targets[0])


def test_riders_have_a_digest_each() -> None:
    sink = Sink(8, 8)
    with pytest.raises(RemoteProtocolError):
        sink.reception.on_riders(Riders(7, (0, 1), (b"one",)), bytes(16))


@pytest.mark.parametrize("part", [0, 1], ids=["that comes", "that came"])
def test_a_rider_needs_no_done(part: int) -> None:
    sink = Sink(8, 8)
    sink.reception.on_riders(*riders(1, sizes=(8,)))
    with pytest.raises(RemoteProtocolError, match="makes no sense"):
        sink.reception.on_done(Done(7, part, b""))


async def test_no_rider_lands_in_memory_that_is_quiet() -> None:
    sink = Sink(8, 8)
    sink.reception.stop()
    sink.reception.on_riders(*riders(0, 1, sizes=(8, 8)))
    assert not any(sink.targets[0]) and not sink.verified


def test_parts_that_do_not_come_here_are_not_waited_for() -> None:
    sink = Sink(8)
    targets = [None, memoryview(bytearray(8)), None]
    reception = Reception(
        *(sink, 7, targets, sink),  # type: ignore[arg-type]
        has_riders=True,
    )
    reception.begin()
    with pytest.raises(RemoteProtocolError, match="Done for part 2"):
        reception.on_done(Done(7, 2))
    reception.on_riders(Riders(7, (1,), (digest_of(bytes(8)),)), bytes(8))
    assert [index for index, _ in sink.verified] == [1] and not sink.expected
