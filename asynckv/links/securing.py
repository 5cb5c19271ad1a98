"""The TLS handshake of one connection, beside the loop."""

from __future__ import annotations

import asyncio
import ssl

from asynckv.errors import AuthError, PeerLost
from asynckv.links.offloading import in_thread
from asynckv.security.assurance import NO_ASSURANCE, Assurance
from asynckv.security.tls import ALPN, TlsKeys, tls_failure
from asynckv.security.tls_socket import Connection, TlsSocket, WantsToWrite

__all__ = ("assurance_of", "secure", "wait_readable", "wait_writable")


def assurance_of(sock: Connection) -> Assurance:
    """Return what a connection has proved before anything was said over it."""
    return sock.assurance() if isinstance(sock, TlsSocket) else NO_ASSURANCE


async def secure(sock: TlsSocket, keys: TlsKeys) -> None:
    """Shake hands, and refuse who is not certified or not allowed.

    What takes time to compute is done in threads. On return this side knows who
    the peer is; that the peer wants to know us, only its next words tell.
    Bounded by the caller's deadline; a cancelled call leaves ``sock`` unusable.

    :raises AuthError: the peer is not let in, or does not let us in
    :raises PeerLost: the peer hung up
    """
    try:
        await _shake_hands(sock)
    except ssl.SSLError as exc:
        raise tls_failure(exc) from exc
    except OSError as exc:
        raise PeerLost(f"the connection broke in the TLS handshake: {exc}") from exc
    if sock.protocol != ALPN:
        raise AuthError("the peer speaks TLS, but is no asynckv")
    sock.peer_names().check_allowed(keys.allowed_peers)


async def _shake_hands(sock: TlsSocket) -> None:
    while True:
        try:
            await in_thread(sock.shake_hands)
            return
        except WantsToWrite:
            await wait_writable(sock)
        except BlockingIOError:
            await wait_readable(sock)


async def wait_readable(sock: Connection) -> None:
    """Wait until there is something to receive. A cancelled call leaves no trace."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock, _settle, ready)
    try:
        await ready
    finally:
        loop.remove_reader(sock)


async def wait_writable(sock: Connection) -> None:
    """Wait until more can be sent. A cancelled call leaves no trace."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_writer(sock, _settle, ready)
    try:
        await ready
    finally:
        loop.remove_writer(sock)


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
