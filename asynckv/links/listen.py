"""Waiting for links: one listener, all the links that came through it.

Links inside one process are opened here too: the same bytes, handed over through the
loop. The one global of this package says which names are listened at.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import socket
import weakref
from collections.abc import Callable
from typing import Final

import anyio

from asynckv.affinity import ProcessBound
from asynckv.errors import (
    AsyncKVError,
    ConfigError,
    PeerLost,
    ProtocolError,
    WrongLoop,
)
from asynckv.links.acceptor import Acceptor
from asynckv.links.address import Address, check_exposure, parse_url
from asynckv.links.link import Link, Service
from asynckv.links.options import keys_of, make_terms
from asynckv.links.reader import Turns
from asynckv.links.sockets import bind, remove_place
from asynckv.links.streams import MemoryStream
from asynckv.protocol.codec import encode_frame, max_unfinished_bytes
from asynckv.protocol.failures import to_refuse
from asynckv.protocol.handshake import Agreement, DigestMode, Terms
from asynckv.protocol.hello import DialSide, ListenSide
from asynckv.protocol.limits import Unfinished
from asynckv.protocol.values import Limits, PeerIdentity
from asynckv.security.keyring import NO_KEYS, Keyring, Keys
from asynckv.security.shared_secret import new_nonce
from asynckv.types import KVFingerprint

__all__ = ("LinkListener", "dial_memory", "listen")

logger = logging.getLogger(__name__)

_DEFAULT_LIMITS: Final = Limits()
_CLOSE_S: Final = 3.0
_MAX_UNFINISHED_BYTES: Final = 2**28
"""What requests may keep of which a part has come, unless told otherwise."""


class LinkListener(ProcessBound):
    """Where links are opened: ``url`` says at what address, with the real port.

    A peer has one link at a time: a second one of the same ``identity.id``
    ends the first, be it a reconnect or a restart.
    """

    def __init__(
        self,
        address: Address,
        sock: socket.socket | None,
        terms: Terms,
        keyring: Keyring,
        service_for: Callable[[Link], Service],
        on_link: Callable[[Link], None] | None,
        max_bytes: int,
    ) -> None:
        self._own()
        self.loop = asyncio.get_running_loop()
        self._terms = terms
        self._keyring = keyring
        of_one_link = max_unfinished_bytes(terms.limits)
        self._unfinished = Unfinished(max(max_bytes, of_one_link))
        self._service_for = service_for
        self._on_link = on_link
        self._links: dict[str, Link] = {}
        # Lost, and perhaps not closed yet: the peer still sends.
        self._ended: weakref.WeakSet[Link] = weakref.WeakSet()
        self._place = self._name = ""
        self._inode = 0
        self._acceptor: Acceptor | None = None
        if sock is None:
            self._turns = Turns(self.loop)
            self._name = address.place or f"unnamed-{next(_numbers)}"
            self.url = f"mem://{self._name}"
            if self._name in _listeners:
                raise ConfigError(
                    f"{self.url} is listened at already",
                    hint="mem:// without a name takes a free one",
                )
            _listeners[self._name] = self
        else:
            self._acceptor = self._accept_at(address, sock)

    def _accept_at(self, address: Address, sock: socket.socket) -> Acceptor:
        if address.scheme == "unix":
            self._place = address.place
            self._inode = os.lstat(self._place).st_ino
        else:
            address = dataclasses.replace(address, port=sock.getsockname()[1])
        self.url = str(address)
        return Acceptor(
            *(sock, self._terms, self._keyring, self.adopt),
            url=self.url,
            unfinished=self._unfinished,
        )

    async def greeting_side(self) -> ListenSide:
        """Return the listening side of a greeting within this process.

        :raises PeerLost: the listener was closed meanwhile
        """
        keys = await keys_of(self._keyring)
        if _listeners.get(self._name) is not self:
            raise _nobody(self._name)
        return ListenSide(self._terms, keys.secrets, nonce=new_nonce())

    def make_link(self, stream: MemoryStream, agreement: Agreement) -> Link:
        """Return a link within this process, which waits to be adopted."""
        return Link(
            *(stream, agreement),
            dialled=False,
            url=self.url,
            turns=self._turns,
            unfinished=self._unfinished,
        )

    @property
    def links(self) -> tuple[Link, ...]:
        """The links that are up."""
        return tuple(self._links.values())

    async def aclose(self) -> None:
        """Take no more links, and close those that are up.

        Bounded; a cancellation aborts what is left. Safe to call again.
        """
        links = self.links
        greetings = self._close_acceptor()
        try:
            with anyio.move_on_after(_CLOSE_S, shield=True):
                await asyncio.gather(
                    *(link.aclose() for link in links), return_exceptions=True
                )
                if greetings:
                    await asyncio.wait(greetings)
        finally:
            self.abort()

    def stop_accepting(self) -> None:
        """Take no more links. Those that are up stay. Never waits."""
        self._close_acceptor()

    def abort(self) -> None:
        """Close it and every link now. Never waits."""
        self._close_acceptor()
        for link in [*self.links, *self._ended]:
            link.abort()

    def _close_acceptor(self) -> list[asyncio.Task[bool]]:
        if self._is_copy:
            return []
        if self._place:
            remove_place(self._place, self._inode)
            self._place = ""
        if self._acceptor is not None:
            return self._acceptor.close()
        if _listeners.get(self._name) is self:
            del _listeners[self._name]
        return []

    def adopt(self, link: Link) -> None:
        """Let a link that is complete be served."""
        peer = link.peer
        older = self._links.pop(peer.id, None)
        if older is not None:
            older.abort(PeerLost(f"{peer.id} has opened a new link"))
        self._links[peer.id] = link
        link.call_when_lost(lambda error: self._on_lost(link, error))
        try:
            service = self._service_for(link)
            if self._on_link is not None:
                self._on_link(link)
        except Exception as exc:
            # A fault of ours: the peer learns of it by the end of its link.
            logger.exception("nobody serves the link to %s", peer.id)
            link.abort(exc)
            return
        link.start(service)
        where = (self.url, peer.id, link.transport_name)
        logger.info("%s: %s connected, payload by %s", *where)

    def _on_lost(self, link: Link, error: PeerLost) -> None:
        if error.goodbye:
            logger.info("%s: %s left", self.url, link.peer.id)
        elif not isinstance(error.__cause__, ProtocolError):  # that was logged
            logger.info("%s: %s is lost: %s", self.url, link.peer.id, str(error))
        if self._links.get(link.peer.id) is link:
            self._ended.add(link)
            self.release(link)

    def release(self, link: Link) -> None:
        """Leave a link to its owner: closing the listener does not close it."""
        if self._links.get(link.peer.id) is link:
            del self._links[link.peer.id]


async def listen(
    url: str,
    *,
    identity: PeerIdentity,
    service_for: Callable[[Link], Service],
    fingerprint: KVFingerprint | None = None,
    digest: DigestMode = "full",
    lanes: int | None = None,
    limits: Limits = _DEFAULT_LIMITS,
    on_link: Callable[[Link], None] | None = None,
    keyring: Keyring = NO_KEYS,
    max_unfinished_bytes: int = _MAX_UNFINISHED_BYTES,
) -> LinkListener:
    """Listen at ``url``; port 0 takes a free port, which ``listener.url`` says.

    ``service_for(link)`` is asked once a link, before its first frame is read;
    then ``on_link(link)`` is called. Requests of which a part has come keep at most
    ``max_unfinished_bytes``, or what one link may keep if that is more. Waits for
    the files of ``keyring``, and until a host is found by its name; a cancelled call
    listens nowhere.

    :raises ConfigError: the address cannot be listened at, or asks for more
        protection, or the keys cannot be read
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
    await keys_of(keyring)
    sock = None if address.scheme == "mem" else await bind(address)
    return LinkListener(
        *(address, sock, terms, keyring),
        *(service_for, on_link, max_unfinished_bytes),
    )


_listeners: Final[weakref.WeakValueDictionary[str, LinkListener]] = (
    weakref.WeakValueDictionary()
)
_numbers: Final = itertools.count(1)


async def dial_memory(address: Address, terms: Terms, keys: Keys) -> Link:
    """Open a link to the listener at that name, in this process.

    :raises PeerLost: nobody listens at that name
    :raises WrongLoop: its listener runs on another event loop
    """
    loop = asyncio.get_running_loop()
    listener = _listeners.get(address.place)
    if listener is None:
        raise _nobody(address.place)
    if listener.loop is not loop:
        raise WrongLoop(f"the listener at {address} runs on another event loop")
    ours, theirs = MemoryStream.pair(loop)
    near = DialSide(terms, keys.first_secret, nonce=new_nonce())
    far = await listener.greeting_side()
    link = their_link = None
    try:
        their_link = listener.make_link(theirs, _greet(near, far))
        near.receive(far.welcome(b"", their_link.payload.describe()))
        agreement = near.outcome().agreement
        link = Link(ours, agreement, dialled=True, url=str(address))
        await _join(link, their_link, agreement.lanes)
        listener.adopt(their_link)
    except BaseException:
        for half in (link, their_link):
            if half is not None:
                half.abort()
        raise
    return link


def _greet(near: DialSide, far: ListenSide) -> Agreement:
    """Carry what each side says to the other, up to an agreement or a refusal."""
    said = near.hello
    while far.agreement is None:
        try:
            answer = far.receive(said)
        except AsyncKVError as exc:
            answer = encode_frame(0, to_refuse(exc))[0]
        said = near.receive(answer)
    return far.agreement


def _nobody(name: str) -> PeerLost:
    return PeerLost(
        f"nobody listens at mem://{name}",
        hint="mem:// reaches listeners of this process only",
    )


async def _join(link: Link, their_link: Link, lanes: int) -> None:
    if link.transport_name != "inline":
        await link.payload.open(b"", their_link.payload)
        await their_link.payload.open(b"", link.payload)
        return
    with contextlib.ExitStack() as stack:
        pairs = []
        for _ in range(lanes):
            pairs.append(socket.socketpair())
            for sock in pairs[-1]:
                stack.enter_context(sock)
        await link.payload.open(b"", [pair[0] for pair in pairs])
        await their_link.payload.open(b"", [pair[1] for pair in pairs])
        stack.pop_all()
