from __future__ import annotations

import os
import socket

import pytest

from asynckv.errors import ConfigError
from asynckv.testing.faults.places import place_of


@pytest.mark.parametrize(
    "url", ["mem://here", "tcp://127.0.0.1", "unix://", "http://x:1", "nonsense"]
)
def test_where_no_proxy_can_stand(url: str) -> None:
    with pytest.raises(ConfigError, match="no proxy can stand"):
        place_of(url)


def test_a_url_says_where_to_dial() -> None:
    assert place_of("tcp://[::1]:70").target == ("::1", 70)
    assert place_of("tcp://:70?payload=inline").target == ("127.0.0.1", 70)
    assert place_of("tls://10.0.0.1:7").family == socket.AF_INET
    assert place_of("unix:///run/a%20b").target == "/run/a b"


async def test_the_place_beside_a_tcp_listener_is_a_loopback_port() -> None:
    place, sock = await place_of("tls://10.1.2.3:70").listen_beside()
    with sock, await place_of(place.url).connect() as dialled:
        assert dialled.getpeername() == sock.getsockname()
        assert place.url.startswith("tls://127.0.0.1:")
    await place.remove()


async def test_the_place_beside_a_unix_socket_is_this_users_alone() -> None:
    place, sock = await place_of("unix:///run/asynckv.sock").listen_beside()
    with sock, await place_of(place.url).connect():
        found = os.stat(place.folder)
        assert (found.st_mode & 0o777, found.st_uid) == (0o700, os.geteuid())
    await place.remove()
    with pytest.raises(FileNotFoundError):
        os.stat(place.folder)


async def test_payload_goes_through_the_proxy_unless_the_url_says_how() -> None:
    for url, query in (("tcp://:70", "inline"), ("tcp://:70?payload=x", "x")):
        place, sock = await place_of(url).listen_beside()
        sock.close()
        assert place.url.endswith(f"?payload={query}")
