from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator

import pytest

from asynckv.security.names import Assurance
from asynckv.security.tls import ALPN, TlsKeys, read_tls
from asynckv.security.tls_socket import (
    TlsSocket,
    WantsToWrite,
    discard,
    has_hung_up,
    is_readable,
)
from asynckv.testing.certificates import Authority


def shake_hands(near: TlsSocket, far: TlsSocket) -> None:
    waiting = [near, far]
    while waiting:
        for side in list(waiting):
            with contextlib.suppress(BlockingIOError):
                side.shake_hands()
                waiting.remove(side)


@pytest.fixture
def pair(authority: Authority) -> Iterator[tuple[TlsSocket, TlsSocket]]:
    one, two = socket.socketpair()
    keys = read_tls(authority.issue("near", "127.0.0.1"))
    near = TlsSocket.over(one, keys, dials="127.0.0.1")
    far = TlsSocket.over(two, keys)
    with near, far:
        shake_hands(near, far)
        yield near, far


def test_bytes_go_both_ways(pair: tuple[TlsSocket, TlsSocket]) -> None:
    near, far = pair
    assert near.protocol == far.protocol == ALPN
    assert near.send(b"hello") == 5
    assert far.recv(2) == b"he"
    assert far.pending() == 3
    buffer = bytearray(10)
    assert far.recv_into(memoryview(buffer)) == 3
    assert far.pending() == 0
    assert far.send(memoryview(buffer)[:3]) == 3
    assert near.recv(10) == b"llo"


def test_nothing_waits(pair: tuple[TlsSocket, TlsSocket]) -> None:
    near, far = pair
    with pytest.raises(BlockingIOError):
        near.recv(1)
    with pytest.raises(BlockingIOError):
        near.recv_into(bytearray(1))
    large, got, has_left = memoryview(bytearray(2**22)), 0, False
    with pytest.raises(WantsToWrite):
        near.send(large)
    while got < len(large):
        with contextlib.suppress(BlockingIOError):
            got += len(far.recv(2**16))
        with contextlib.suppress(BlockingIOError):
            has_left = has_left or near.send(large) == len(large)
    assert has_left
    assert got == len(large)


def test_both_sides_know_the_names_and_bind_to_both_certificates(
    pair: tuple[TlsSocket, TlsSocket],
) -> None:
    near, far = pair
    assert near.peer_names().names == ("near", "127.0.0.1")
    assert near.assurance() == far.assurance()
    assert len(near.assurance().binding) == 64


def test_another_certificate_is_another_binding(authority: Authority) -> None:
    bindings = set()
    for _ in range(2):
        one, two = socket.socketpair()
        near = TlsSocket.over(one, read_tls(authority.issue()), dials="localhost")
        far = TlsSocket.over(two, read_tls(authority.issue()))
        with near, far:
            shake_hands(near, far)
            bindings |= {near.assurance().binding, far.assurance().binding}
    assert len(bindings) == 2


def test_after_a_shutdown_nothing_is_taken_for_what_the_peer_said(
    pair: tuple[TlsSocket, TlsSocket],
) -> None:
    near, far = pair
    near.send(b"unread")
    far.shutdown(socket.SHUT_RDWR)
    received = b""
    with contextlib.suppress(OSError):
        while data := far.recv(100):
            received += data
    assert received in (b"", b"unread")
    with pytest.raises(OSError):
        far.send(b"plaintext")
        far.send(b"plaintext")


def test_what_is_closed_stays_closed(pair: tuple[TlsSocket, TlsSocket]) -> None:
    near, _ = pair
    near.close()
    for use in (
        lambda: near.send(b"x"),
        lambda: near.recv(1),
        lambda: near.recv_into(bytearray(1)),
        lambda: near.shutdown(socket.SHUT_RDWR),
    ):
        with pytest.raises(OSError, match=r"closed|Bad file"):
            use()


def test_a_changed_byte_is_an_error(authority: Authority) -> None:
    keys = read_tls(authority.issue())
    (one, wire), (back, two) = socket.socketpair(), socket.socketpair()
    near, far = TlsSocket.over(one, keys, dials="localhost"), TlsSocket.over(two, keys)
    with near, far, wire, back:
        stop = threading.Event()
        for source in (wire, back):
            source.settimeout(0.01)
        pump = threading.Thread(target=_carry, args=(wire, back, stop))
        pump.start()
        shake_hands(near, far)
        stop.set()
        pump.join()
        near.send(b"precious")
        data = bytearray(wire.recv(1000))
        data[-1] ^= 1
        back.send(data)
        with pytest.raises(ssl.SSLError):
            far.recv(100)


def _carry(one: socket.socket, two: socket.socket, stop: threading.Event) -> None:
    while not stop.is_set():
        for source, target in ((one, two), (two, one)):
            with contextlib.suppress(TimeoutError):
                target.sendall(source.recv(65536))


def test_what_comes_after_a_failure_is_dropped_undeciphered(
    pair: tuple[TlsSocket, TlsSocket],
) -> None:
    near, far = pair
    near.send(b"x")
    assert discard(far) > 1
    one, two = socket.socketpair()
    with one, two:
        one.send(b"xyz")
        assert discard(two) == 3


def test_whether_the_peer_has_hung_up_is_told_without_taking_anything(
    pair: tuple[TlsSocket, TlsSocket],
) -> None:
    one, two = socket.socketpair()
    with one, two:
        one.setblocking(False)
        for near, far in (pair, (two, one)):
            assert not has_hung_up(far)
            near.send(b"x")
            assert not has_hung_up(far)
            assert far.recv(100) == b"x"
            near.close()
            assert has_hung_up(far)
            far.close()
            assert has_hung_up(far)


def test_whether_something_has_come_is_told_without_taking_anything(
    pair: tuple[TlsSocket, TlsSocket],
) -> None:
    near, far = pair
    one, two = socket.socketpair()
    two.setblocking(False)
    with one, two:
        for sender, sock in ((near, far), (one, two)):
            assert not is_readable(sock)
            sender.send(b"hello")
            assert is_readable(sock)
            assert sock.recv(5) == b"hello"
            sender.shutdown(socket.SHUT_RDWR)
            assert not is_readable(sock)


def test_a_socket_whose_peer_is_gone_is_left_to_its_owner(authority: Authority) -> None:
    keys = read_tls(authority.issue())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    near.close()
    with far:
        with pytest.raises(OSError, match="not connected"):
            TlsSocket.over(far, keys)
        assert far.fileno() >= 0


def talk(
    keys: TlsKeys, flight: int = -1, place: int = 0
) -> tuple[list[int], Assurance | None]:
    """Shake hands, with a bit of one byte changed on the way.

    Returns how many bytes each flight had, and what both sides know in the end
    of each other, if it came to that.
    """
    (one, wire), (other, two) = socket.socketpair(), socket.socketpair()
    lengths: list[int] = []
    with (
        TlsSocket.over(one, keys, dials="localhost") as near,
        TlsSocket.over(two, keys) as far,
        wire,
        other,
    ):
        wire.setblocking(False)
        other.setblocking(False)
        sides = [(near, wire, other), (far, other, wire)]
        waiting, idle = [near, far], 0
        while waiting and idle < 4:
            idle += 1
            for side, source, target in sides:
                try:
                    if side in waiting:
                        with contextlib.suppress(BlockingIOError):
                            side.shake_hands()
                            waiting.remove(side)
                    data = bytearray(source.recv(65536))
                    # A signature is a byte longer or shorter each time.
                    if len(lengths) == flight and place < len(data):
                        data[place] ^= 1 << place % 8
                    target.send(data)
                    idle = 0
                    lengths.append(len(data))
                except BlockingIOError:
                    continue
                except OSError:
                    return lengths, None
        return lengths, None if waiting else near.assurance()


@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.trust)])
def test_a_handshake_with_any_byte_changed_fails_or_changes_nothing(
    authority: Authority, every: int
) -> None:
    keys = read_tls(authority.issue())
    lengths, expected = talk(keys)
    assert expected is not None
    for flight, length in enumerate(lengths):
        for place in range(flight % every, length, every):
            _, known = talk(keys, flight, place)
            assert known in (None, expected)
