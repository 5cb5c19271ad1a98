"""What peers say by hand, to sides that know of no other route than the link."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Mapping, Sequence

from asynckv.devices.copying import CopyPool
from asynckv.links.fd_socket import fetch_file
from asynckv.links.link import Link, LinkStream
from asynckv.protocol.frames import (
    Accepted,
    Cancelled,
    Failure,
    Frame,
    Insert,
    Offer,
    Push,
    Select,
)
from asynckv.protocol.transfer_frames import Exposed, Grant, OpenMemory, Proved
from asynckv.sharing.peer_imports import PeerImports
from asynckv.tensors.shared_file import MappedFile
from asynckv.transfers.delivery import ReceiveBudget
from asynckv.transfers.manifest import layout_of, pack
from asynckv.transfers.routes import PeerRoutes
from asynckv.transfers.tokens import Tokens
from asynckv.types import TensorSpec
from harness.link_pairs import Hearer

__all__ = (
    "NoRoutes",
    "RawInsert",
    "RawMapper",
    "body_with",
)


class RawInsert:
    """An insert of uint8 tensors, of so many bytes each, under the id ``it``.

    ``streaming`` opens a writer; ``inline`` bytes ride with the request.
    """

    def __init__(
        self,
        link: Link,
        *sizes: int,
        streaming: bool = False,
        inline: bytes | None = None,
        digest: bytes = b"",
        on_gpu: bool = False,
    ) -> None:
        self.hearer = Hearer()
        self.transfer = link.new_transfer()
        self._link = link
        frame = Insert(
            *("it", self.transfer),
            inline=inline is not None,
            streaming=streaming,
            on_gpu=on_gpu,
        )
        pieces = [] if inline is None else [memoryview(inline)]
        specs = {
            f"{number}.key": TensorSpec((nbytes,), "uint8")
            for number, nbytes in enumerate(sizes or map(len, pieces))
        }
        body = body_with(specs, pieces, digests=[digest] * len(specs))
        self.stream = link.open_stream(self.hearer, frame, body)

    async def granted(self, transfer: int | None = None) -> None:
        """Wait until a transfer is granted, by default the insert itself."""
        grant = Grant(self.transfer if transfer is None else transfer)
        while await self.hearer.next() != (grant, b""):
            pass

    async def push(self, part: int = 0) -> int:
        """Announce a tensor, and wait until it is granted."""
        transfer = self._link.new_transfer()
        self.stream.send(Push(transfer, part, inline=False))
        await self.granted(transfer)
        return transfer

    def push_inline(self, body: bytes, part: int = 0, digest: bytes = b"") -> None:
        """Send a tensor that rides along."""
        transfer = self._link.new_transfer()
        self.stream.send(Push(transfer, part, inline=True, digest=digest), body)

    async def last(self) -> Frame:
        """Wait for the last frame of the answer."""
        while True:
            frame, _ = await self.hearer.next()
            if isinstance(frame, Accepted | Cancelled | Failure):
                return frame

    async def failure(self) -> Failure:
        """As :meth:`last`, which says why the insert has failed.

        :raises AssertionError: it has not
        """
        last = await self.last()
        if not isinstance(last, Failure):
            raise AssertionError(f"it ended by {last}")
        return last


def body_with(
    specs: Mapping[str, TensorSpec],
    inline: Iterable[memoryview] = (),
    *,
    digests: Sequence[bytes] | None = None,
    tokens: Tokens | None = None,
    roi: Tokens | None = None,
) -> bytes:
    """Return the body of an entry of these tensors, by default without digests."""
    digests = [b""] * len(specs) if digests is None else digests
    return pack(layout_of(specs), digests, tokens, roi, inline)


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


class NoRoutes(PeerRoutes):
    """What it sends is read by ``pool``; what it receives lands in ``budget``."""

    def __init__(
        self, pool: CopyPool | None = None, budget: ReceiveBudget | None = None
    ) -> None:
        super().__init__(
            PeerImports("full", ""), budget or ReceiveBudget(2**30), pool or CopyPool()
        )
