"""Links inside one process: the handshake is the same bytes, handed over.

The one global of this package is here: which names are listened at.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import weakref
from collections.abc import Callable
from typing import Final

from asynckv.errors import AsyncKVError, ConfigError, PeerLost, WrongLoop
from asynckv.links.address import Address
from asynckv.links.keys import keys_of
from asynckv.links.link import Link
from asynckv.links.memory import MemoryStream
from asynckv.links.turns import Turns
from asynckv.protocol.codec import encode_frame
from asynckv.protocol.failures import to_refuse
from asynckv.protocol.greeting import DialSide, ListenSide
from asynckv.protocol.handshake import Agreement, Terms
from asynckv.protocol.unfinished import Unfinished
from asynckv.security.keyring import Keyring, Keys
from asynckv.security.proofs import new_nonce

__all__ = ("MemoryDoor", "dial_memory")

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
