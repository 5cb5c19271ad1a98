"""A peer that maps a served buffer's memory, and then says what it likes."""

from __future__ import annotations

import socket
import struct

from asynckv.links.fd_socket import fetch_file
from asynckv.links.link import Link, LinkStream
from asynckv.protocol.frames import Frame, Offer, Select
from asynckv.protocol.transfer_frames import Exposed, OpenMemory, Proved
from asynckv.tensors.shared_file import MappedFile
from harness.link_pairs import Hearer

__all__ = ("RawMapper",)


class RawMapper:
    """One link's mapping, step by step, without any good manners.

    ``sock`` and ``file`` are what came for the ticket.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.sock: socket.socket | None = None
        self.file: MappedFile | None = None
        self.hearer = Hearer()
        self._asking: LinkStream | None = None

    async def ask(self) -> Exposed:
        """Ask for the memory; return the invitation.

        :raises ValueError: there is none
        """
        self._asking = self.link.open_stream(self.hearer, OpenMemory("lookup"))
        frame, _ = await self.hearer.next()
        if not isinstance(frame, Exposed):
            raise ValueError(f"no invitation, but {frame}")
        return frame

    async def fetch(self, exposed: Exposed) -> MappedFile:
        """Take the ticket to the other socket, and map what comes for it."""
        self.sock, fd = await fetch_file(exposed.address, exposed.ticket)
        self.file = MappedFile(fd, exposed.nbytes)
        return self.file

    async def say(self, frame: Frame) -> Frame:
        """Say something where the mapping is agreed on; return the answer."""
        if self._asking is not None:
            self._asking.send(frame)
        return (await self.hearer.next())[0]

    async def map(self) -> MappedFile:
        """Do all of it as it should be done."""
        file = await self.fetch(await self.ask())
        await self.say(Proved(file.nonce))
        return file

    async def select(self) -> tuple[Hearer, LinkStream, Offer, bytes]:
        """Ask for any entry; return the stream, the offer and its body.

        :raises ValueError: no offer came
        """
        hearer = Hearer()
        stream = self.link.open_stream(hearer, Select(has_key=False))
        frame, body = await hearer.next()
        if not isinstance(frame, Offer):
            raise ValueError(f"no offer, but {frame}")
        return hearer, stream, frame, body

    def release(self, *numbers: int) -> None:
        """Say that nothing is left of these pins."""
        self.tell(struct.pack(f"!{len(numbers)}Q", *numbers))

    def tell(self, message: bytes) -> None:
        """Say anything on the other socket."""
        if self.sock is not None:
            self.sock.send(message)

    async def aclose(self) -> None:
        """Hang up everywhere."""
        if self.sock is not None:
            self.sock.close()
        if self.file is not None:
            self.file.close()
        await self.link.aclose()
