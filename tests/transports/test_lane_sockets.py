from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import queue
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Final

import pytest
from hypothesis import given, strategies as st

from asynckv.security.tls import read_tls
from asynckv.security.tls_socket import Connection, TlsSocket
from asynckv.testing.certificates import Authority
from asynckv.transports import lane_sockets
from asynckv.transports.lane_sockets import (
    LaneOwner,
    LaneSocket,
    LaneWire,
    PlainWire,
    TlsWire,
    rest_of,
    vectors_of,
    wire_over,
)

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
@pytest.mark.parametrize(
    "move",
    [
        lambda lane: lane.send(b"head", [memoryview(bytes(64 * 2**20))]),
        lambda lane: lane.receive([memoryview(bytearray(4))], may_end=True),
    ],
    ids=["send", "receive"],
)
def test_who_hears_nothing_of_the_peer_gets_an_error(
    over_tcp: tuple[LaneSocket, socket.socket], move: Callable[[LaneSocket], object]
) -> None:
    lane, far = over_tcp
    _cut(far)
    with pytest.raises(OSError) as raised:
        move(lane)
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


_SIZES = st.lists(st.sampled_from([0, 1, 4096, 65536, 262144, 2**20]), max_size=1500)


@given(_SIZES)
def test_vectors_are_the_pieces_in_order(sizes: list[int]) -> None:
    pieces = [memoryview(bytes(nbytes)) for nbytes in sizes]
    found = [len(piece) for vector in vectors_of(pieces) for piece in vector]
    assert found == sizes or not any(sizes[len(found) :])


def test_small_pieces_go_together_and_large_ones_alone() -> None:
    small, large = memoryview(bytes(4096)), memoryview(bytes(2**21))
    vectors = list(vectors_of([small] * 130 + [large] * 2))
    assert [len(vector) for vector in vectors] == [64, 64, 3, 1]
    assert [len(vector) for vector in vectors_of([small[:1]] * 600)] == [512, 88]


@given(st.lists(st.integers(0, 5)), st.data())
def test_the_rest_is_what_has_not_moved(sizes: list[int], data: st.DataObject) -> None:
    pieces = [memoryview(bytes([number] * n)) for number, n in enumerate(sizes)]
    moved = data.draw(st.integers(0, sum(sizes)))
    rest = rest_of(pieces, moved)
    assert b"".join(rest) == b"".join(pieces)[moved:]
    assert bool(rest) == (moved < sum(sizes))


Ends = tuple[Connection, Connection]


@contextlib.contextmanager
def connected(kind: str, authority: Authority) -> Iterator[Ends]:
    one, two = socket.socketpair()
    if kind == "plain":
        with one, two:
            yield one, two
        return
    keys = read_tls(authority.issue())
    with TlsSocket.over(one, keys, dials="localhost") as near:
        with TlsSocket.over(two, keys) as far:
            waiting = [near, far]
            while waiting:
                for side in list(waiting):
                    with contextlib.suppress(BlockingIOError):
                        side.shake_hands()
                        waiting.remove(side)
            yield near, far


@pytest.fixture(params=["plain", "tls"])
def ends(request: pytest.FixtureRequest, authority: Authority) -> Iterator[Ends]:
    with connected(request.param, authority) as both:
        yield both


def receive(wire: LaneWire, nbytes: int) -> bytes:
    into, got = memoryview(bytearray(nbytes)), 0
    while got < nbytes and (count := wire.receive_some([into[got:]])):
        got += count
    return bytes(into[:got])


def in_threads(*works: Callable[[], object]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize("nbytes", [0, 1, 16 * 1024 - 6, 16 * 1024, 300_000, 2**22 + 1])
def test_a_piece_arrives_behind_its_header(ends: Ends, nbytes: int) -> None:
    near, far = (wire_over(end) for end in ends)
    piece, got = os.urandom(nbytes), []
    in_threads(
        lambda: near.send(b"header", [memoryview(piece)]),
        lambda: got.append(receive(far, nbytes + 6)),
    )
    assert got == [b"header" + piece]


@pytest.mark.parametrize("nbytes", [1, 4096, 18_000, 300_000])
def test_scattered_pieces_are_gathered_and_scattered(ends: Ends, nbytes: int) -> None:
    near, far = LaneSocket(ends[0]), LaneSocket(ends[1])
    sent = [os.urandom(nbytes) for _ in range(700 if nbytes < 5000 else 30)]
    places = [bytearray(nbytes) for _ in sent]
    head = bytearray(6)
    in_threads(
        lambda: near.send(b"header", [memoryview(piece) for piece in sent]),
        lambda: far.receive([memoryview(place) for place in (head, *places)]),
    )
    assert head == b"header"
    assert b"".join(places) == b"".join(sent)


def test_both_directions_at_once(ends: Ends) -> None:
    near, far = (wire_over(end) for end in ends)
    pieces = [os.urandom(2**23) for _ in range(2)]
    got: dict[str, bytes] = {}
    in_threads(
        lambda: near.send(b"", [memoryview(pieces[0])]),
        lambda: far.send(b"", [memoryview(pieces[1])]),
        lambda: got.update(far=receive(far, 2**23)),
        lambda: got.update(near=receive(near, 2**23)),
    )
    assert got == {"far": pieces[0], "near": pieces[1]}


def test_the_peers_hanging_up_is_the_end(ends: Ends) -> None:
    near, far = (wire_over(end) for end in ends)
    near.send(b"a", [memoryview(b"b")])
    ends[0].shutdown(socket.SHUT_RDWR)
    assert receive(far, 100) == b"ab"


@pytest.mark.parametrize("doing", ["sending", "receiving"])
def test_a_thread_that_waits_is_woken_by_a_shutdown(ends: Ends, doing: str) -> None:
    near, started = wire_over(ends[0]), threading.Event()

    def work() -> None:
        started.set()
        with contextlib.suppress(OSError):
            if doing == "receiving":
                receive(near, 10)
            else:
                near.send(b"", [memoryview(bytes(2**26))])

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    thread.join(0.05)
    assert thread.is_alive()
    ends[0].shutdown(socket.SHUT_RDWR)
    thread.join(10)
    assert not thread.is_alive()


def test_the_wire_is_that_of_its_connection(authority: Authority) -> None:
    for kind, wire in (("plain", PlainWire), ("tls", TlsWire)):
        with connected(kind, authority) as (near, _):
            assert isinstance(wire_over(near), wire)
