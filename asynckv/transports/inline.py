"""Payload over sockets: one connection a lane, blocking, moved by threads.

Bytes go from the sender's memory to the receiver's and through nothing else in
this process, but for small blocks: those go through 512 KiB of their lane's, which is
less work than to name each. Threads start with the first part that needs them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, Final

from asynckv.abc import PayloadTransport
from asynckv.errors import AsyncKVError, LocalProtocolError, PeerLost
from asynckv.tensors.feeds import Feed
from asynckv.tensors.runs import Memory
from asynckv.transports.lanes import Lanes
from asynckv.transports.parts import (
    Completions,
    DoneCallback,
    FedPart,
    Part,
    PartTable,
    PendingParts,
)
from asynckv.transports.quiesce import Ending, QuiesceWaits

__all__ = ("DEFAULT_CHUNK_BYTES", "InlineTransport")

DEFAULT_CHUNK_BYTES: Final = 4 * 2**20

_CLOSE_S: Final = 1.0
_BLOCKED_LOOKS: Final = 5000


class InlineTransport(PayloadTransport):
    """Payload lanes over connected stream sockets, TCP or unix.

    ``on_lost(error)`` is called on the loop, at most once, if the transport
    ends in any way but by :meth:`aclose` or :meth:`abort`: with ``PeerLost``
    or ``RemoteProtocolError``. After any end each part that has not moved is
    told so (``done(b"", error)``) as soon as no thread touches any memory.

    A transfer's parts leave in the order in which they were queued on their
    lane; transfers take turns, chunk by chunk.
    """

    name: ClassVar[str] = "inline"
    can_block_until_quiet = True

    def __init__(
        self,
        lanes: int,
        digest: bool,
        loop: asyncio.AbstractEventLoop,
        on_lost: Callable[[Exception], None],
        max_chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> None:
        self._lane_count = self.feeds = lanes
        self._digest = digest
        self._table = PartTable()
        self._leaving: PendingParts[Part] = PendingParts(loop)
        self._arriving: PendingParts[Part] = PendingParts(loop)
        self._completions = Completions(loop, self._complete)
        self._lanes = Lanes(
            loop,
            self._leaving,
            self._table,
            max_chunk_bytes,
            moved=self._completions.add,
            release=self._release,
            lost=self._lose,
        )
        self._quiet = QuiesceWaits(loop, self._lanes.is_touched)
        self._ending = Ending(
            loop,
            on_lost,
            hang_up=self._lanes.shut_down,
            is_touching=lambda: self._lanes.threads > 0,
            take_left=self._take_left,
        )

    def describe(self) -> bytes:
        return b""

    async def open(self, peer_description: bytes, side_channel: object) -> None:
        """Take over the connected sockets in ``side_channel``, one a lane.

        :raises LocalProtocolError: there are not as many as lanes
        """
        if not isinstance(side_channel, Sequence):
            raise LocalProtocolError("an inline transport opens on sockets")
        if len(side_channel) != self._lane_count:
            raise LocalProtocolError(
                f"{len(side_channel)} sockets for {self._lane_count} lanes"
            )
        self._lanes.open(side_channel)

    def send(
        self,
        transfer: int,
        part: int,
        source: Memory,
        done: DoneCallback,
        *,
        digest: bytes | None = None,
    ) -> None:
        self._check_open()
        known = digest if self._digest else b""
        self._send(Part(transfer, part, source, done, known))

    def feed(
        self,
        transfer: int,
        part: int,
        source: Feed,
        done: DoneCallback,
        *,
        digest: bytes | None = None,
    ) -> None:
        self._check_open()
        known = digest if self._digest else b""
        self._send(FedPart(transfer, part, source, done, known))

    def _send(self, outgoing: Part) -> None:
        self._leaving.add(outgoing)
        if self._ending.error is not None:
            self._ending.settle_soon()
        elif outgoing.nbytes:
            self._lanes.send(outgoing)
        else:
            self._completions.add(outgoing)

    def receive(
        self, transfer: int, part: int, target: Memory, done: DoneCallback
    ) -> None:
        """As the contract says.

        :raises LocalProtocolError: the part is waited for already, or the
            transport is not open yet
        """
        self._check_open()
        incoming = Part(transfer, part, target, done, None if self._digest else b"")
        if incoming.nbytes:
            self._table.add(incoming)
        else:
            self._table.announce(transfer)
        self._arriving.add(incoming)
        if self._ending.error is not None:
            self._ending.settle_soon()
        elif incoming.nbytes:
            self._lanes.receive()
        else:
            self._completions.add(incoming)

    def announce(self, transfer: int) -> None:
        self._table.announce(transfer)

    def landed_bytes(self, transfer: int) -> int:
        return self._table.landed_bytes(transfer)

    def stop(self, transfer: int) -> None:
        self._table.stop(transfer)
        self._lanes.stop(transfer)
        self._leaving.stop(transfer)
        self._arriving.stop(transfer)

    async def quiesce(self, transfer: int) -> None:
        self.stop(transfer)

        def give_up() -> None:
            if self._lanes.is_touched(transfer):
                self._lose(PeerLost("a payload lane did not let go of memory in time"))

        await self._quiet.wait(transfer, give_up)

    def block_until_quiet(self, transfer: int) -> None:
        self.stop(transfer)
        for _ in range(_BLOCKED_LOOKS):
            if not self._lanes.is_touched(transfer):
                return
            # A plain function has nothing to await, and a lane needs but a moment.
            time.sleep(_CLOSE_S / _BLOCKED_LOOKS)  # noqa: TID251

    async def aclose(self) -> None:
        """As the contract says: at most 1 s for queued parts, 1 s for threads."""
        try:
            if self._ending.error is None:
                await self._leaving.wait_until_none(_CLOSE_S)
        finally:
            self.abort()
            await self._ending.wait(_CLOSE_S)

    def abort(self) -> None:
        """End now. Never waits; threads let go within a moment."""
        self._ending.end(PeerLost("the payload lanes were closed on this side"))

    def _check_open(self) -> None:
        if not self._lanes.is_open:
            raise LocalProtocolError("the payload lanes are not open yet")

    def _complete(self, part: Part) -> None:
        if part in self._leaving:
            self._leaving.complete(part)
        else:
            self._arriving.complete(part)

    def _release(self) -> None:
        self._quiet.settle()
        self._ending.settle()

    def _lose(self, cause: BaseException | None) -> None:
        if isinstance(cause, AsyncKVError):
            self._ending.lose(cause)
        else:
            error = PeerLost("a payload lane ended before what it had to carry")
            error.__cause__ = cause
            self._ending.lose(error)

    def _take_left(self) -> list[Part]:
        """What has moved is told that first; the rest never will."""
        self._completions.deliver_all()
        self._table.clear()
        return [*self._leaving.take_all(), *self._arriving.take_all()]
