from __future__ import annotations

import ctypes
import errno
import os
import queue
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from typing import Final

import pytest

from asynckv.transports import lane_sockets
from asynckv.transports.lane_sockets import LaneOwner, LaneSocket

_ATTACH_FILTER: Final = 26
_DROP_ALL: Final = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
"""One instruction, ``ret 0``: see socket(7), ``SO_ATTACH_FILTER``."""

on_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="kernels notice in ways of their own elsewhere"
)


def _fail() -> None:
    raise ValueError("not my day")


def test_a_thread_says_how_it_ended(
    lane: LaneSocket, owner: LaneOwner, said: queue.Queue[object]
) -> None:
    assert lane.start(lambda: None, "send", owner.sender_ended)
    assert said.get(timeout=5) == "ended"
    assert lane.start(_fail, "send", owner.sender_ended)
    assert isinstance(said.get(timeout=5), ValueError)


def test_what_the_world_does_keeps_no_frame_of_a_thread(
    lane: LaneSocket, owner: LaneOwner, said: queue.Queue[object]
) -> None:
    def lose() -> None:
        try:
            _fail()
        except ValueError:
            raise BrokenPipeError from None

    assert lane.start(lose, "send", owner.sender_ended)
    error = said.get(timeout=5)
    assert isinstance(error, BrokenPipeError) and error.__traceback__ is None
    assert error.__context__ is not None and error.__context__.__traceback__ is None


def test_a_thread_that_cannot_be_started_has_ended_by_that_error(
    lane: LaneSocket,
    owner: LaneOwner,
    said: queue.Queue[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert lane.start(_fail, "send", owner.sender_ended)
    assert isinstance(said.get_nowait(), RuntimeError)
    lane.shut_down()
    assert lane.sock.fileno() == -1


def test_the_last_thread_closes_the_socket(
    lane: LaneSocket, owner: LaneOwner, said: queue.Queue[object]
) -> None:
    into = memoryview(bytearray(1))
    lane.start(lambda: _receive(lane, into), "receive", owner.receiver_ended)
    lane.shut_down()
    assert said.get(timeout=5) == "ended"
    assert lane.sock.fileno() == -1
    assert not lane.start(_fail, "send", owner.sender_ended)


def _receive(lane: LaneSocket, into: memoryview) -> None:
    assert not lane.receive([into], may_end=True)


def test_both_pieces_arrive_whole(lane: LaneSocket, far: socket.socket) -> None:
    piece = memoryview(bytes(range(256)) * 2**14)
    got = memoryview(bytearray(4 + piece.nbytes))
    reading = threading.Thread(target=LaneSocket(far).receive, args=[[got]])
    reading.start()
    lane.send(b"head", [piece])
    reading.join()
    assert bytes(got) == b"head" + bytes(piece)


@pytest.mark.parametrize("sent", [b"", b"abc"])
def test_hanging_up_where_it_may_not_be_is_an_error(
    lane: LaneSocket, far: socket.socket, sent: bytes
) -> None:
    far.sendall(sent)
    far.close()
    with pytest.raises(EOFError):
        lane.receive([memoryview(bytearray(4))], may_end=bool(sent))


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities on Linux")
def test_threads_run_behind_the_event_loop(
    lane: LaneSocket, owner: LaneOwner, said: queue.Queue[object]
) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    lane.start(
        lambda: said.put(os.getpriority(os.PRIO_PROCESS, 0)), "send", owner.sender_ended
    )
    assert said.get(timeout=5) == min(before + 5, 19)
    assert said.get(timeout=5) == "ended"
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def _cut(sock: socket.socket) -> None:
    """Let no segment reach ``sock``: what is sent to it is not even acknowledged."""
    program = struct.pack("HP", 1, ctypes.addressof(_DROP_ALL))
    sock.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)


@pytest.fixture
def over_tcp(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[LaneSocket, socket.socket]]:
    """A lane over TCP, and the far end of it."""
    monkeypatch.setattr(lane_sockets, "DEAD_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    lane = LaneSocket(near)
    with far:
        yield lane, far
    lane.shut_down()


@on_linux
def test_who_sends_into_silence_gets_an_error(
    over_tcp: tuple[LaneSocket, socket.socket],
) -> None:
    lane, far = over_tcp
    _cut(far)
    with pytest.raises(OSError) as raised:
        lane.send(b"head", [memoryview(bytes(64 * 2**20))])
    assert raised.value.errno == errno.ETIMEDOUT


@on_linux
def test_who_receives_nothing_asks_and_gets_an_error(
    over_tcp: tuple[LaneSocket, socket.socket],
) -> None:
    lane, far = over_tcp
    _cut(far)
    with pytest.raises(OSError) as raised:
        lane.receive([memoryview(bytearray(4))], may_end=True)
    assert raised.value.errno == errno.ETIMEDOUT


def test_a_peer_that_is_there_may_be_quiet(
    over_tcp: tuple[LaneSocket, socket.socket],
) -> None:
    lane, far = over_tcp
    got = memoryview(bytearray(4))
    far.settimeout(2.5)
    with pytest.raises(TimeoutError):
        far.recv(1)
    far.sendall(b"here")
    assert lane.receive([got])
    assert bytes(got) == b"here"
