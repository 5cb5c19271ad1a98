from __future__ import annotations

from asynckv.protocol.wire import digest_of
from asynckv.tensors.feeds import Feed
from asynckv.transports.parts import FedPart


def test_a_fed_part_moves_as_its_bytes_come() -> None:
    feed, told = Feed(5), list[tuple[bytes, BaseException | None]]()
    part = FedPart(2, 1, feed, lambda *what: told.append(what), None)
    assert (part.left_bytes, part.ready_bytes) == (5, 0)
    wakes = list[int]()
    part.call_when_ready(lambda: wakes.append(part.ready_bytes))
    source = bytearray(b"abc")
    feed.put(memoryview(source))
    assert wakes == [3]
    part.add_to_digest(part.pieces(0, 3))
    part.move(3)
    source.clear()  # what was sent is kept no longer
    assert (part.left_bytes, part.ready_bytes) == (2, 0)
    feed.put(memoryview(b"de"))
    part.add_to_digest(part.pieces(3, 5))
    part.move(2)
    part.complete()
    assert told == [(digest_of(b"abcde"), None)]


def test_a_fed_part_that_is_let_go_keeps_nothing() -> None:
    source, feed = bytearray(b"abc"), Feed(5)
    part = FedPart(2, 1, feed, lambda *_: None, b"")
    feed.put(memoryview(source))
    part.release()
    source.clear()
