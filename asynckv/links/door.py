"""Links inside one process: the handshake is the same bytes, handed over.

The one global of this package is here: which names are listened at.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import weakref
from collections.abc import Callable
from typing import Final

from asynckv.errors import (
    AsyncKVError,
    ConfigError,
    PeerLost,
    RemoteProtocolError,
    WrongLoop,
)
from asynckv.links.address import Address
from asynckv.links.link import Link
from asynckv.links.memory import MemoryStream
from asynckv.protocol.codec import FrameDecoder, encode_frame
from asynckv.protocol.failures import to_refuse
from asynckv.protocol.frames import Frame, Hello
from asynckv.protocol.handshake import (
    WELCOME_LIMITS,
    Terms,
    accept_welcome,
    agree,
    encode_hello,
    hello_from,
    welcome_to,
)

__all__ = ("MemoryDoor", "dial_memory")

_doors: Final[weakref.WeakValueDictionary[str, MemoryDoor]] = (
    weakref.WeakValueDictionary()
)
_numbers: Final = itertools.count(1)


class MemoryDoor:
    """Where links to one ``mem://`` name arrive. Without a name it gets one."""

    def __init__(self, name: str, terms: Terms, adopt: Callable[[Link], None]) -> None:
        self.name = name or f"unnamed-{next(_numbers)}"
        self.loop = asyncio.get_running_loop()
        self.adopt = adopt
        self._terms = terms
        if self.name in _doors:
            raise ConfigError(
                f"mem://{self.name} is listened at already",
                hint="mem:// without a name takes a free one",
            )
        _doors[self.name] = self

    def close(self) -> list[asyncio.Task[bool]]:
        """Take no more links. There is nothing to wait for."""
        if _doors.get(self.name) is self:
            del _doors[self.name]
        return []

    def greet(self, stream: MemoryStream, hello: bytes) -> tuple[Link | None, bytes]:
        """Answer a Hello: with a link that waits to be adopted, or a refusal."""
        try:
            frame = _only_frame(hello)
            if not isinstance(frame, Hello):
                raise RemoteProtocolError(f"{type(frame).__name__} is no greeting")
            agreement = agree(self._terms, frame)
        except AsyncKVError as exc:
            return None, encode_frame(0, to_refuse(exc))[0]
        link = Link(stream, agreement, dialled=False, url=f"mem://{self.name}")
        welcome = welcome_to(
            self._terms,
            agreement,
            link_token=b"",
            payload_description=link.payload.describe(),
        )
        return link, encode_frame(0, welcome)[0]


async def dial_memory(address: Address, terms: Terms) -> Link:
    """Open a link to the door of that name, in this process.

    :raises PeerLost: nobody listens at that name
    :raises WrongLoop: its listener runs on another event loop
    """
    loop = asyncio.get_running_loop()
    door = _doors.get(address.place)
    if door is None:
        raise PeerLost(
            f"nobody listens at {address}",
            hint="mem:// reaches listeners of this process only",
        )
    if door.loop is not loop:
        raise WrongLoop(f"the listener at {address} runs on another event loop")
    ours, theirs = MemoryStream.pair(loop)
    their_link, answer = door.greet(theirs, encode_hello(hello_from(terms)))
    link: Link | None = None
    try:
        agreement, _ = accept_welcome(terms, _only_frame(answer))
        link = Link(ours, agreement, dialled=True, url=str(address))
        if their_link is None:
            raise RemoteProtocolError("a Welcome without a link")
        await _join(link, their_link, agreement.lanes)
        door.adopt(their_link)
    except BaseException:
        for half in (link, their_link):
            if half is not None:
                half.abort()
        raise
    return link


async def _join(link: Link, their_link: Link, lanes: int) -> None:
    if link.transport_name != "inline":
        await link.payload.open(b"", their_link.payload)
        await their_link.payload.open(b"", link.payload)
        return
    pairs = [socket.socketpair() for _ in range(lanes)]
    await link.payload.open(b"", [pair[0] for pair in pairs])
    await their_link.payload.open(b"", [pair[1] for pair in pairs])


def _only_frame(data: bytes) -> Frame:
    for _, frame, _ in FrameDecoder(WELCOME_LIMITS).feed(data):
        return frame
    raise RemoteProtocolError("a greeting that is no whole frame")
