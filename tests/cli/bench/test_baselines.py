from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from asynckv.cli.bench.baselines import RawConnection, RawServer, receive_into

TOKEN = bytes(range(32))


@pytest.fixture
def raw() -> Iterator[RawConnection]:
    server = RawServer("127.0.0.1", TOKEN)
    connection = RawConnection("127.0.0.1", server.port, TOKEN)
    yield connection
    connection.close()
    server.close()


def test_a_pull_fills_every_target(raw: RawConnection) -> None:
    targets = [memoryview(bytearray(100_000)) for _ in range(3)]
    assert raw.pull(targets) > 0
    assert all(set(target) == {1} for target in targets)


def test_a_push_returns_when_the_peer_has_it_all(raw: RawConnection) -> None:
    assert raw.push([memoryview(bytes(100_000))] * 3) > 0
    assert len(raw.ping(2)) == 2


def test_every_ping_is_timed(raw: RawConnection) -> None:
    assert [seconds > 0 for seconds in raw.ping(3)] == [True] * 3


def test_the_peer_says_how_much_cpu_it_used(raw: RawConnection) -> None:
    assert 0 < raw.cpu_s() <= raw.cpu_s()


def test_a_peer_that_hangs_up_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"12")
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError):
            receive_into(ours, memoryview(bytearray(3)))
