"""Opening a link: greet, agree, attach the payload lanes."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from asynckv.errors import AsyncKVError, AuthError, PeerLost
from asynckv.links.address import Address, check_exposure, parse_url
from asynckv.links.link import Link, Service
from asynckv.links.listen import dial_memory
from asynckv.links.options import keys_of, make_terms
from asynckv.links.sockets import (
    assurance_of,
    connect,
    converse,
    read_first_frame,
    secure,
    send_first_frame,
)
from asynckv.links.streams import SocketStream
from asynckv.protocol.handshake import DigestMode, Terms
from asynckv.protocol.hello import DialSide, Outcome
from asynckv.protocol.values import Limits, PeerIdentity
from asynckv.security.keyring import NO_KEYS, Keyring, Keys
from asynckv.security.shared_secret import new_nonce
from asynckv.security.tls_socket import Connection, TlsSocket, has_hung_up
from asynckv.types import KVFingerprint

__all__ = ("dial",)

_DEFAULT_LIMITS: Final = Limits()


async def dial(
    url: str,
    *,
    identity: PeerIdentity,
    service: Service | None = None,
    fingerprint: KVFingerprint | None = None,
    digest: DigestMode = "full",
    lanes: int | None = None,
    limits: Limits = _DEFAULT_LIMITS,
    keyring: Keyring = NO_KEYS,
    timeout_s: float = 10.0,
) -> Link:
    """Open a link to the listener at ``url``; on return the peer has let us in.

    Waits at most ``timeout_s``. A cancelled call leaves nothing behind.
    ``service`` answers what the peer asks; without one every request of the
    peer fails with :exc:`~asynckv.errors.WrongRole`.

    :raises PeerLost: nobody listens there, or did not answer in time
    :raises IncompatiblePeer: the peers cannot exchange KV; ``field`` says why
    :raises AuthError: the peer is not let in, or not who it should be
    :raises ProtocolError: something else than asynckv answers
    :raises ConfigError: a URL or a number of lanes that cannot be, keys that
        cannot be read, or an address that asks for more protection
    """
    address = parse_url(url)
    check_exposure(address, keyring)
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
            link = await open_link(address, terms, await keys_of(keyring))
    except TimeoutError as exc:
        raise PeerLost(
            f"{address} did not answer within {timeout_s:g} s",
            hint="something listens, but it is busy, frozen or no asynckv",
        ) from exc
    except AsyncKVError:
        raise
    except OSError as exc:
        raise PeerLost(
            f"no connection to {address} could be made: {exc}",
            hint="has this process file descriptors left? See ulimit -n",
        ) from exc
    link.start(service)
    return link


async def _dial_sockets(address: Address, terms: Terms, keys: Keys) -> Link:
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        control = await _connect(address, keys)
        stack.callback(control.close)
        side = DialSide(
            terms,
            keys.first_secret,
            nonce=new_nonce(),
            assurance=assurance_of(control),
        )
        await send_first_frame(control, side.hello)
        await converse(control, side)
        outcome = side.outcome()
        agreement = outcome.agreement
        lanes = []
        for lane in range(agreement.lanes):
            try:
                lanes.append(await _attach(address, keys, outcome, lane))
            except AuthError as exc:
                if has_hung_up(control):
                    raise _given_up(address) from exc
                raise
            stack.callback(lanes[-1].close)
        link = Link(
            SocketStream(control, loop), agreement, dialled=True, url=str(address)
        )
        stack.callback(link.abort)
        await link.payload.open(agreement.payload_description, lanes)
        stack.pop_all()
    return link


def _given_up(address: Address) -> PeerLost:
    return PeerLost(
        f"{address} gave this link up before its lanes came",
        hint="many others may be connecting at the same time; try again",
    )


async def _connect(address: Address, keys: Keys) -> Connection:
    """Return a connection, over which we know who the peer is if it is TLS."""
    plain = await connect(address)
    if keys.tls is None:
        return plain
    with contextlib.ExitStack() as stack:
        stack.enter_context(plain)
        host = keys.tls.server_name or address.name or address.host
        sock = stack.enter_context(TlsSocket.over(plain, keys.tls, dials=host))
        await secure(sock, keys.tls)
        stack.pop_all()
    return sock


async def _attach(
    address: Address, keys: Keys, outcome: Outcome, lane: int
) -> Connection:
    """Return a connection that the peer took as a payload lane of our link."""
    sock = await _connect(address, keys)
    try:
        await send_first_frame(sock, outcome.attach(lane))
        outcome.check_attached(lane, await read_first_frame(sock))
    except BaseException:
        sock.close()
        raise
    return sock
