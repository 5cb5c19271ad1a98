from __future__ import annotations

import pytest

from asynckv.tensors.feeds import Feed


def fed(*pieces: bytes) -> Feed:
    feed = Feed(10)
    for piece in pieces:
        feed.put(memoryview(piece))
    return feed


def test_what_has_come_is_read_across_pieces() -> None:
    feed = fed(b"abc", b"def", b"gh")
    assert feed.fed_bytes == 8
    assert b"".join(feed.pieces(1, 7)) == b"bcdefg"
    assert b"".join(feed.pieces(3, 6)) == b"def"


def test_each_piece_is_told() -> None:
    feed, told = fed(b"abc"), list[int]()
    feed.call_when_fed(lambda: told.append(feed.fed_bytes))
    feed.put(memoryview(b"de"))
    feed.put(memoryview(b"f"))
    assert told == [5, 6]


def test_what_was_left_is_not_kept() -> None:
    first, second = bytearray(b"abc"), bytearray(b"def")
    feed = Feed(6)
    feed.put(memoryview(first))
    feed.put(memoryview(second))
    feed.leave(5)
    first.clear()
    assert bytes(feed.pieces(5, 6)[0]) == b"f"
    with pytest.raises(BufferError):
        second.clear()
    feed.leave(6)
    second.clear()


def test_a_feed_that_is_closed_keeps_nothing() -> None:
    first, second = bytearray(b"abc"), bytearray(b"def")
    feed, told = Feed(6), list[None]()
    feed.call_when_fed(lambda: told.append(None))
    feed.put(memoryview(first))
    feed.close()
    feed.put(memoryview(second))
    first.clear()
    second.clear()
    assert feed.fed_bytes == 6 and len(told) == 1


def test_more_than_was_to_come_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 10"):
        fed(b"abcdefgh").put(memoryview(b"ijk"))
