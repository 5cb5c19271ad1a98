"""Links inside one process: the same bytes, handed over through the loop.

The one global of this package is here: which names are listened at.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import socket
import weakref
from collections.abc import Callable
from typing import Final

from asynckv.errors import AsyncKVError, ConfigError, PeerLost, WrongLoop
from asynckv.links.address import Address
from asynckv.links.incoming import Turns
from asynckv.links.link import Link
from asynckv.links.options import keys_of
from asynckv.links.streams import ControlStream, StreamOwner
from asynckv.protocol.codec import encode_frame
from asynckv.protocol.failures import to_refuse
from asynckv.protocol.greeting import DialSide, ListenSide
from asynckv.protocol.handshake import Agreement, Terms
from asynckv.protocol.limits import Unfinished
from asynckv.security.keyring import Keyring, Keys
from asynckv.security.proofs import new_nonce

__all__ = (
    "MemoryDoor",
    "MemoryStream",
    "dial_memory",
)


class MemoryStream(ControlStream):
    """One end of a pair; what one writes, the other receives a tick later."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._owner: StreamOwner | None = None
        self._other: MemoryStream = self
        # What the other end wrote and this one has not received; None ends it.
        self._inbox: collections.deque[bytes | None] = collections.deque()
        self._paused = True
        self._closed = False
        self._finished = False
        self._delivery: asyncio.Handle | None = None

    @classmethod
    def pair(cls, loop: asyncio.AbstractEventLoop) -> tuple[MemoryStream, MemoryStream]:
        """Return two connected ends."""
        one, two = cls(loop), cls(loop)
        one._other, two._other = two, one
        return one, two

    def start(self, owner: StreamOwner) -> None:
        self._owner = owner
        self.resume_reading()

    def write(self, data: bytes) -> None:
        if not self._closed and not self._finished:
            self._other._accept(data)

    def finish(self) -> None:
        if not self._closed and not self._finished:
            self._finished = True
            self._other._accept(None)

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        self._deliver_soon()

    def abort(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._owner = None
        self._inbox.clear()
        self._other.unsent_bytes = 0
        if self._delivery is not None:
            self._delivery.cancel()
        if not self._finished:
            self._other._accept(None)

    def _accept(self, data: bytes | None) -> None:
        if self._closed:
            return
        self._inbox.append(data)
        self._other.unsent_bytes += len(data or b"")
        self._deliver_soon()

    def _deliver_soon(self) -> None:
        if self._inbox and self._delivery is None and not self._paused:
            self._delivery = self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._delivery = None
        while self._inbox and not self._paused and self._owner is not None:
            data = self._inbox.popleft()
            if data is None:
                self._owner.on_end(None)
                return
            self._other.unsent_bytes -= len(data)
            self._other.sent_bytes += len(data)
            self._owner.on_bytes(data)
        if not self._other.unsent_bytes and self._other._owner is not None:
            self._other._owner.on_writable()


_doors: Final[weakref.WeakValueDictionary[str, MemoryDoor]] = (
    weakref.WeakValueDictionary()
)
_numbers: Final = itertools.count(1)


class MemoryDoor:
    """Where links to one ``mem://`` name arrive. Without a name it gets one."""

    def __init__(
        self,
        name: str,
        terms: Terms,
        keyring: Keyring,
        adopt: Callable[[Link], None],
        unfinished: Unfinished,
    ) -> None:
        self.name = name or f"unnamed-{next(_numbers)}"
        self.loop = asyncio.get_running_loop()
        self.adopt = adopt
        self._keyring = keyring
        self._terms = terms
        self._turns = Turns(self.loop)
        self._unfinished = unfinished
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

    async def side(self) -> ListenSide:
        """Return the listening side of one greeting.

        :raises PeerLost: the door was closed meanwhile
        """
        keys = await keys_of(self._keyring)
        if _doors.get(self.name) is not self:
            raise _nobody(self.name)
        return ListenSide(self._terms, keys.secrets, nonce=new_nonce())

    def link(self, stream: MemoryStream, agreement: Agreement) -> Link:
        """Return a link that waits to be adopted."""
        url = f"mem://{self.name}"
        return Link(
            stream,
            agreement,
            dialled=False,
            url=url,
            turns=self._turns,
            unfinished=self._unfinished,
        )


async def dial_memory(address: Address, terms: Terms, keys: Keys) -> Link:
    """Open a link to the door of that name, in this process.

    :raises PeerLost: nobody listens at that name
    :raises WrongLoop: its listener runs on another event loop
    """
    loop = asyncio.get_running_loop()
    door = _doors.get(address.place)
    if door is None:
        raise _nobody(address.place)
    if door.loop is not loop:
        raise WrongLoop(f"the listener at {address} runs on another event loop")
    ours, theirs = MemoryStream.pair(loop)
    near = DialSide(terms, keys.first_secret, nonce=new_nonce())
    far = await door.side()
    link = their_link = None
    try:
        their_link = door.link(theirs, _greet(near, far))
        near.receive(far.welcome(b"", their_link.payload.describe()))
        agreement = near.outcome().agreement
        link = Link(ours, agreement, dialled=True, url=str(address))
        await _join(link, their_link, agreement.lanes)
        door.adopt(their_link)
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
