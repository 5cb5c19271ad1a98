from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from asynckv.security.tls import read_tls
from asynckv.security.tls_socket import Connection, TlsSocket
from asynckv.testing.certificates import Authority
from asynckv.transports.lane_sockets import (
    LaneSocket,
    LaneWire,
    PlainWire,
    TlsWire,
    wire_over,
)

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
