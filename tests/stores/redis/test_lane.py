"""A lane brings bytes to where they stay, and ends where nothing moves."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from asynckv.stores.redis.lane import Lane, NotRedis, ServerError, command
from asynckv.stores.threads import Stopped


class Ends:
    """A lane, and the socket at its other end."""

    def __init__(self) -> None:
        here, self.there = socket.socketpair()
        self.is_stopping = False
        self.lane = Lane(here, lambda: self.is_stopping, 0.1)


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.lane.close()
    ends.there.close()


def test_a_command_is_an_array_of_strings() -> None:
    assert command(b"GETRANGE", b"k", 0, -1) == (
        b"*4\r\n$8\r\nGETRANGE\r\n$1\r\nk\r\n$1\r\n0\r\n$2\r\n-1\r\n"
    )


def test_answers_are_read_one_after_the_other_however_they_come(ends: Ends) -> None:
    answers = b":1\r\n+OK\r\n$5\r\na\r\nbc\r\n$-1\r\n-OOM no room\r\n$0\r\n\r\n"

    def say() -> None:
        for at in range(len(answers)):
            ends.there.send(answers[at : at + 1])

    saying = threading.Thread(target=say)
    saying.start()
    read = [ends.lane.read_reply() for _ in range(6)]
    saying.join()
    error = read.pop(4)
    assert isinstance(error, ServerError)
    assert error.code == "OOM"
    assert read == [1, b"OK", b"a\r\nbc", None, b""]


def test_an_array_is_how_many_answers_come_then(ends: Ends) -> None:
    ends.there.send(b"*2\r\n$1\r\n0\r\n*0\r\n-NOPERM no scan\r\n:1\r\n")
    assert ends.lane.begin_array() == 2
    assert (ends.lane.read_reply(), ends.lane.begin_array()) == (b"0", 0)
    with pytest.raises(ServerError, match="no scan"):
        ends.lane.begin_array()
    with pytest.raises(NotRedis):
        ends.lane.begin_array()


@pytest.mark.parametrize("pieces", [1, 3, 200])
def test_payload_lands_where_it_stays_and_is_counted(pieces: int, ends: Ends) -> None:
    data = bytes(range(256)) * 6000
    memory = bytearray(len(data))
    each = -(-len(data) // pieces)
    views = [memoryview(memory)[k * each : (k + 1) * each] for k in range(pieces)]
    said = b"$%d\r\n%b\r\n:7\r\n" % (len(data), data)
    saying = threading.Thread(target=ends.there.sendall, args=(said,))
    saying.start()
    moved: list[int] = []
    assert ends.lane.begin_payload() == len(data)
    ends.lane.read_into(views, moved.append)
    ends.lane.end_payload()
    assert ends.lane.read_reply() == 7
    saying.join()
    assert memory == data
    assert sum(moved) == len(data)


@pytest.mark.parametrize("pieces", [1, 3, 200])
def test_all_pieces_leave_in_their_order(pieces: int, ends: Ends) -> None:
    data = bytes(range(256)) * 6000
    each = -(-len(data) // pieces)
    views = [memoryview(data)[k * each : (k + 1) * each] for k in range(pieces)]
    moved: list[int] = []
    sending = threading.Thread(target=ends.lane.send, args=(views, moved.append))
    sending.start()
    came = b""
    while len(came) < len(data):
        came += ends.there.recv(2**20)
    sending.join()
    assert came == data
    assert sum(moved) == len(data)


def test_an_empty_piece_is_nothing(ends: Ends) -> None:
    ends.lane.send([b"", memoryview(b"a"), b""])
    assert ends.there.recv(9) == b"a"
    ends.lane.read_into([memoryview(bytearray())])


@pytest.mark.parametrize(
    "said", [b"?\r\n", b"*1\r\n", b":x\r\n", b"$x\r\n", b"$99999999\r\n", b"\r\n"]
)
def test_what_is_no_answer_is_told_apart(said: bytes, ends: Ends) -> None:
    ends.there.sendall(said)
    with pytest.raises(NotRedis):
        ends.lane.read_reply()


def test_a_line_has_an_end(ends: Ends) -> None:
    ends.there.sendall(b"+" + b"x" * 20_000)
    with pytest.raises(NotRedis):
        ends.lane.read_reply()


def test_payload_that_goes_on_is_told_apart(ends: Ends) -> None:
    ends.there.sendall(b"$1\r\nabc\r\n")
    assert ends.lane.begin_payload() == 1
    ends.lane.read_into([memoryview(bytearray(1))])
    with pytest.raises(NotRedis):
        ends.lane.end_payload()


def test_instead_of_payload_an_error_may_come_or_something_else(ends: Ends) -> None:
    ends.there.sendall(b"-WRONGTYPE no\r\n:1\r\n")
    with pytest.raises(ServerError):
        ends.lane.begin_payload()
    with pytest.raises(NotRedis):
        ends.lane.begin_payload()


def test_who_says_nothing_is_waited_for_only_so_long(ends: Ends) -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        ends.lane.read_reply()
    with pytest.raises(TimeoutError):
        ends.lane.send([bytes(2**24)])
    assert 0.2 <= time.monotonic() - began < 5


def test_who_ends_the_connection_is_gone(ends: Ends) -> None:
    ends.there.close()
    with pytest.raises(ConnectionError):
        ends.lane.read_reply()


def test_a_lane_that_nobody_needs_any_more_stops(ends: Ends) -> None:
    stopping = threading.Timer(0.02, lambda: setattr(ends, "is_stopping", True))
    stopping.start()
    with pytest.raises(Stopped):
        ends.lane.read_reply()
    stopping.join()
