"""Waiting for links: one listener, all the links that came through it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import weakref
from collections.abc import Callable
from typing import Final

import anyio

from asynckv.errors import PeerLost, ProtocolError
from asynckv.links.address import Address, check_exposure, parse_url
from asynckv.links.dial import make_terms
from asynckv.links.door import MemoryDoor
from asynckv.links.link import Link, Service
from asynckv.links.options import keys_of
from asynckv.links.reception import Reception
from asynckv.links.sockets import bind, remove_place
from asynckv.processes import ProcessBound
from asynckv.protocol.codec import max_unfinished_bytes as bound_of_one_link
from asynckv.protocol.handshake import DigestMode, Terms
from asynckv.protocol.limits import Unfinished
from asynckv.protocol.values import Limits, PeerIdentity
from asynckv.security.keyring import NO_KEYS, Keyring
from asynckv.types import KVFingerprint

__all__ = ("LinkListener", "listen")

logger = logging.getLogger(__name__)

_DEFAULT_LIMITS: Final = Limits()
_CLOSE_S: Final = 3.0
_MAX_UNFINISHED_BYTES: Final = 2**28
"""What requests may keep of which a part has come, unless told otherwise."""


class LinkListener(ProcessBound):
    """An open door: ``url`` says where, with the real port.

    A peer has one link at a time: a second one of the same ``identity.id``
    ends the first, be it a reconnect or a restart.
    """

    def __init__(
        self,
        address: Address,
        terms: Terms,
        keyring: Keyring,
        service_for: Callable[[Link], Service],
        on_link: Callable[[Link], None] | None,
        max_unfinished_bytes: int,
    ) -> None:
        self._own()
        least = bound_of_one_link(terms.limits)
        self._unfinished = Unfinished(max(max_unfinished_bytes, least))
        self._service_for = service_for
        self._on_link = on_link
        self._links: dict[str, Link] = {}
        # Lost, and perhaps not closed yet: the peer still sends.
        self._ended: weakref.WeakSet[Link] = weakref.WeakSet()
        self._place = ""
        self._inode = 0
        self._door: Reception | MemoryDoor
        if address.scheme == "mem":
            self._door = MemoryDoor(
                address.place, terms, keyring, self._adopt, self._unfinished
            )
            self.url = f"mem://{self._door.name}"
        else:
            self._door = self._receive(address, terms, keyring)

    def _receive(self, address: Address, terms: Terms, keyring: Keyring) -> Reception:
        sock = bind(address)
        if address.scheme == "unix":
            self._place = address.place
            self._inode = os.lstat(self._place).st_ino
        else:
            address = dataclasses.replace(address, port=sock.getsockname()[1])
        self.url = str(address)
        return Reception(
            *(sock, terms, keyring, self._adopt),
            url=self.url,
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
        greetings = self._close_door()
        try:
            with anyio.move_on_after(_CLOSE_S, shield=True):
                await asyncio.gather(
                    *(link.aclose() for link in links), return_exceptions=True
                )
                if greetings:
                    await asyncio.wait(greetings)
        finally:
            self.abort()

    def abort(self) -> None:
        """Close the door and every link now. Never waits."""
        self._close_door()
        for link in [*self.links, *self._ended]:
            link.abort()

    def _close_door(self) -> list[asyncio.Task[bool]]:
        if self._is_copy:
            return []
        if self._place:
            remove_place(self._place, self._inode)
            self._place = ""
        return self._door.close()

    def _adopt(self, link: Link) -> None:
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
    the files of ``keyring`` only.

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
    return LinkListener(
        address, terms, keyring, service_for, on_link, max_unfinished_bytes
    )
