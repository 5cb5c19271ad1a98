"""Opening a link: greet, agree, attach the payload lanes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import Final

from asynckv.errors import ConfigError, PeerLost, RemoteProtocolError
from asynckv.links.address import Address, parse_url
from asynckv.links.door import dial_memory
from asynckv.links.link import Link
from asynckv.links.payloads import payload_paths
from asynckv.links.requests import Service
from asynckv.links.sockets import connect, read_first_frame, send_first_frame
from asynckv.links.streams import SocketStream
from asynckv.protocol.codec import encode_frame
from asynckv.protocol.failures import from_refuse
from asynckv.protocol.frames import (
    Attach,
    Attached,
    Limits,
    PeerIdentity,
    Refuse,
    Welcome,
)
from asynckv.protocol.handshake import (
    MAX_LANES,
    WELCOME_LIMITS,
    DigestMode,
    Terms,
    accept_welcome,
    encode_hello,
    hello_from,
)
from asynckv.types import KVFingerprint

__all__ = ("dial", "make_terms")

_DEFAULT_LIMITS: Final = Limits()
_MAX_DEFAULT_LANES: Final = 4


def make_terms(
    address: Address,
    *,
    identity: PeerIdentity,
    fingerprint: KVFingerprint | None,
    digest: DigestMode,
    lanes: int | None,
    limits: Limits,
) -> Terms:
    """Return what this side brings to each handshake at ``address``.

    :raises ConfigError: an impossible number of lanes, or payload path
    """
    if lanes is None:
        lanes = max(1, min(os.cpu_count() or 1, _MAX_DEFAULT_LANES))
    if not 1 <= lanes <= MAX_LANES:
        raise ConfigError(f"{lanes} lanes; a link has 1 to {MAX_LANES}")
    return Terms(
        identity=identity,
        payload_paths=payload_paths(address),
        limits=limits,
        fingerprint=fingerprint,
        digest=digest,
        lanes=lanes,
    )


async def dial(
    url: str,
    *,
    identity: PeerIdentity,
    service: Service | None = None,
    fingerprint: KVFingerprint | None = None,
    digest: DigestMode = "full",
    lanes: int | None = None,
    limits: Limits = _DEFAULT_LIMITS,
    timeout_s: float = 10.0,
) -> Link:
    """Open a link to the listener at ``url``; on return it can be used.

    Waits at most ``timeout_s``. A cancelled call leaves nothing behind.
    ``service`` answers what the peer asks; without one every request of the
    peer fails with :exc:`~asynckv.errors.WrongRole`.

    :raises PeerLost: nobody listens there, or did not answer in time
    :raises IncompatiblePeer: the peers cannot exchange KV; ``field`` says why
    :raises AuthError: the peer is not let in, or not who it should be
    :raises ProtocolError: something else than asynckv answers
    :raises ConfigError: a URL or a number of lanes that cannot be
    """
    address = parse_url(url)
    terms = make_terms(
        address,
        identity=identity,
        fingerprint=fingerprint,
        digest=digest,
        lanes=lanes,
        limits=limits,
    )
    open_link = dial_memory if address.scheme == "mem" else _dial_sockets
    try:
        async with asyncio.timeout(timeout_s):
            link = await open_link(address, terms)
    except TimeoutError as exc:
        raise PeerLost(
            f"{address} did not answer within {timeout_s:g} s",
            hint="something listens, but it is busy, frozen or no asynckv",
        ) from exc
    link.start(service)
    return link


async def _dial_sockets(address: Address, terms: Terms) -> Link:
    loop = asyncio.get_running_loop()
    hello = encode_hello(hello_from(terms))
    with contextlib.ExitStack() as stack:
        control = stack.enter_context(await connect(address))
        await send_first_frame(control, hello)
        answer = await read_first_frame(control, WELCOME_LIMITS)
        agreement, welcome = accept_welcome(terms, answer)
        lanes = [
            stack.enter_context(await _attach(address, welcome, lane))
            for lane in range(agreement.lanes)
        ]
        link = Link(
            SocketStream(control, loop), agreement, dialled=True, url=str(address)
        )
        stack.callback(link.abort)
        await link.payload.open(agreement.payload_description, lanes)
        stack.pop_all()
    return link


async def _attach(address: Address, welcome: Welcome, lane: int) -> socket.socket:
    """Return a connection that the peer took as a payload lane of our link."""
    sock = await connect(address)
    try:
        attach = encode_frame(0, Attach(welcome.link_token, lane))[0]
        await send_first_frame(sock, attach)
        answer = await read_first_frame(sock)
    except BaseException:
        sock.close()
        raise
    if isinstance(answer, Attached):
        return sock
    sock.close()
    if isinstance(answer, Refuse):
        raise from_refuse(answer)
    raise RemoteProtocolError(f"{type(answer).__name__} in answer to an Attach")
