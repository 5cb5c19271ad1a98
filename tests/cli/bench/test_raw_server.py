from __future__ import annotations

import socket

import pytest

from asynckv.cli.bench.baselines import (
    MAX_NBYTES,
    ORDER,
    RawConnection,
    RawServer,
    What,
)
from asynckv.protocol.handshake import MAX_LANES

TOKEN = bytes(range(32))


def dial(server: RawServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), 10)


def test_who_has_another_token_is_hung_up_on() -> None:
    server = RawServer("127.0.0.1", TOKEN)
    try:
        with dial(server) as stranger:
            stranger.sendall(bytes(32))
            assert stranger.recv(1) == b""
    finally:
        server.close()


def test_who_asks_for_too_much_is_hung_up_on() -> None:
    server = RawServer("127.0.0.1", TOKEN)
    try:
        with dial(server) as peer:
            peer.sendall(TOKEN + ORDER.pack(What.PULL, 1, MAX_NBYTES + 1))
            assert peer.recv(1) == b""
    finally:
        server.close()


def test_closing_hangs_up_on_everybody() -> None:
    server = RawServer("127.0.0.1", TOKEN)
    connection = RawConnection("127.0.0.1", server.port, TOKEN)
    connection.ping(1)
    server.close()
    with pytest.raises(OSError):
        connection.ping(1)
    connection.close()


def test_each_connection_sends_from_another_place_of_what_it_was_given() -> None:
    sources = [memoryview(bytes([number]) * 100) for number in range(8)]
    server = RawServer("127.0.0.1", TOKEN, sources)
    place, found = bytearray(100), []
    try:
        for _ in range(5):
            connection = RawConnection("127.0.0.1", server.port, TOKEN)
            connection.pull([memoryview(place)])
            found.append(place[0])
            connection.push([memoryview(place)])  # into memory of its own
            connection.close()
    finally:
        server.close()
    assert found == [2, 4, 6, 0, 2]
    assert [source[0] for source in sources] == list(range(8))


def test_there_are_only_so_many_connections() -> None:
    server = RawServer("127.0.0.1", TOKEN)
    held = [RawConnection("127.0.0.1", server.port, TOKEN) for _ in range(MAX_LANES)]
    for connection in held:
        connection.ping(1)
    with dial(server) as one_more:
        assert one_more.recv(1) == b""
    for connection in held:
        connection.close()
    server.close()
