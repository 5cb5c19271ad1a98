"""A producer that says what it likes: frames of one insert, written by hand."""

from __future__ import annotations

from asynckv.links.link import Link
from asynckv.protocol.frames import (
    Accepted,
    Cancelled,
    Failure,
    Frame,
    Insert,
    Push,
)
from asynckv.protocol.transfer_frames import Grant
from asynckv.types import TensorSpec
from harness.bodies import body_with
from harness.link_pairs import Hearer

__all__ = ("RawInsert",)


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
