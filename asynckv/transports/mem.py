"""Payload within one process: copied from the one side's memory to the other's."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import ClassVar, Final

import torch

from asynckv.abc import PayloadTransport
from asynckv.errors import LocalProtocolError, PeerLost, RemoteProtocolError
from asynckv.protocol.wire import Chunk
from asynckv.tensors.blocks import tensor_in
from asynckv.tensors.copying import HostCopyPool
from asynckv.tensors.runs import Memory, Runs
from asynckv.transports.inline import DEFAULT_CHUNK_BYTES
from asynckv.transports.parts import DoneCallback, Part, PartTable, PendingParts
from asynckv.transports.quiesce import Ending
from asynckv.types import TensorSpec
from asynckv.waits.waiting import wait_shielded

__all__ = ("MemTransport",)

_CLOSE_S: Final = 1.0

_names = itertools.count(1)


class MemTransport(PayloadTransport):
    """One of a pair on the same event loop; each sender copies in a thread.

    Up to 64 KiB are copied at once. ``on_lost`` and ``done`` are called as
    :class:`~asynckv.transports.inline.InlineTransport` calls them.
    """

    name: ClassVar[str] = "mem"

    def __init__(
        self,
        lanes: int,
        digest: bool,
        loop: asyncio.AbstractEventLoop,
        on_lost: Callable[[Exception], None],
        max_chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> None:
        self._digest = digest
        self._loop = loop
        self._peer: MemTransport | None = None
        self._peer_left = False
        self._copies = _Copies(digest)
        self._table = PartTable()
        self._arriving: PendingParts[Part] = PendingParts(loop)
        self._moves: dict[asyncio.Task[None], Part] = {}
        self._ending = Ending(
            loop,
            on_lost,
            hang_up=self._hang_up,
            is_touching=lambda: bool(self._tasks_of(None)),
            take_left=self._take_left,
        )

    def describe(self) -> bytes:
        return b""

    async def open(self, peer_description: bytes, side_channel: object) -> None:
        """Connect with ``side_channel``, the peer's own ``MemTransport``.

        :raises LocalProtocolError: it is something else
        """
        if not isinstance(side_channel, MemTransport):
            raise LocalProtocolError("a mem transport opens on the peer's")
        self._peer = side_channel

    def send(
        self,
        transfer: int,
        part: int,
        source: Memory,
        done: DoneCallback,
        *,
        digest: bytes | None = None,
    ) -> None:
        peer = self._opened()
        known = digest if digest and self._digest else b""
        outgoing = Part(transfer, part, source, done, known)
        if self._peer_left:
            self._loop.call_soon(self._ending.lose, PeerLost("the peer has left"))
        self._start(self._move(outgoing, peer), outgoing)

    def receive(
        self, transfer: int, part: int, target: Memory, done: DoneCallback
    ) -> None:
        """As the contract says.

        :raises LocalProtocolError: the part is waited for already, or the
            transport is not open yet
        """
        self._opened()
        incoming = Part(transfer, part, target, done, b"")
        self._table.announce(transfer)
        if not incoming.left_bytes:
            self._start(self._copies.leave(incoming), incoming)
            return
        self._table.add(incoming)
        self._arriving.add(incoming)
        if self._ending.error is not None:
            self._ending.settle_soon()
        elif self._peer_left:
            self._loop.call_soon(self._ending.lose, PeerLost("the peer has left"))

    def announce(self, transfer: int) -> None:
        self._table.announce(transfer)

    def stop(self, transfer: int) -> None:
        self._table.stop(transfer)
        self._arriving.stop(transfer)
        for part in self._moves.values():
            if part.transfer == transfer:
                part.stopped = True
        for task in self._tasks_of(transfer):
            task.cancel()

    async def quiesce(self, transfer: int) -> None:
        """As the contract says; there is no lane that could fail to let go."""
        self.stop(transfer)
        if tasks := self._tasks_of(transfer):
            await wait_shielded(asyncio.gather(*tasks, return_exceptions=True))

    async def aclose(self) -> None:
        """As the contract says: at most 1 s for queued parts, 1 s to end."""
        try:
            if tasks := self._tasks_of(None):
                moved = asyncio.gather(*tasks, return_exceptions=True)
                await wait_shielded(moved, timeout_s=_CLOSE_S)
        finally:
            self.abort()
            await self._ending.wait(_CLOSE_S)

    def abort(self) -> None:
        """End now. Never waits; the thread lets go within a moment."""
        self._ending.end(PeerLost("the payload transport was closed on this side"))

    def _opened(self) -> MemTransport:
        if self._peer is None:
            raise LocalProtocolError("the payload transport is not open yet")
        return self._peer

    def _start(self, move: Coroutine[None, None, None], part: Part) -> None:
        task = self._loop.create_task(move, name=f"asynckv-mem-{next(_names)}")
        self._moves[task] = part
        task.add_done_callback(self._after)
        if self._ending.error is not None:
            task.cancel()

    def _tasks_of(self, transfer: int | None) -> list[asyncio.Task[None]]:
        """Whoever touches memory of this side, for one transfer or for any."""
        ours = [
            task
            for task, part in self._moves.items()
            if transfer is None or part.transfer == transfer
        ]
        theirs = self._table.carriers_of(transfer)
        return [*ours, *(task for task in theirs if isinstance(task, asyncio.Task))]

    async def _move(self, part: Part, peer: MemTransport) -> None:
        task, target = asyncio.current_task(), None
        if part.left_bytes:
            place = Chunk(part.transfer, part.number, 0, part.left_bytes)
            target = peer._enter(place, task)
        if target is None:
            await self._copies.leave(part)
            return
        landed = False
        try:
            await self._copies.move(part, target)
        except asyncio.CancelledError:
            is_receivers = target.stopped or peer._ending.error is not None
            if is_receivers and not part.stopped and self._ending.error is None:
                # Only the receiver has stopped: to the sender it has left.
                self._start(self._copies.leave(part), part)
            raise
        finally:
            landed = peer._table.leave(target, task)
            # A cancelled task holds this frame, which must not hold the task.
            del task
            if not landed:
                target.release()
            if peer._ending.error is not None:
                peer._ending.settle_soon()
        part.complete()
        if landed:
            peer._arriving.complete(target)

    def _enter(self, place: Chunk, carrier: object) -> Part | None:
        try:
            part = self._table.enter(place, carrier)
        except RemoteProtocolError as exc:
            self._ending.lose(exc)
            return None
        if part is not None and part.left_bytes != place.nbytes:
            self._table.leave(part, carrier)
            error = RemoteProtocolError("a part of another length than expected")
            self._ending.lose(error)
            return None
        return part

    def _after(self, task: asyncio.Task[None]) -> None:
        part = self._moves.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._ending.lose(PeerLost(f"a copy failed: {error}"))
        if part.stopped:
            part.release()
        elif self._ending.error is not None:
            part.complete(self._ending.error)
        self._ending.settle()

    def _take_left(self) -> list[Part]:
        self._table.clear()
        return self._arriving.take_all()

    def _hang_up(self) -> None:
        for task in self._tasks_of(None):
            task.cancel()
        self._copies.close()
        if self._peer is not None and not self._loop.is_closed():
            self._loop.call_soon(self._peer._after_peer)

    def _after_peer(self) -> None:
        self._peer_left = True
        if self._moves or self._table.is_waiting:
            self._ending.lose(PeerLost("the peer closed its side"))


class _Copies:
    """Copies and digests of whole parts, in a thread where they are large."""

    def __init__(self, digest: bool) -> None:
        self._digest = digest
        self._pool = HostCopyPool(threads=1)
        self.close = self._pool.close

    async def move(self, part: Part, target: Part) -> None:
        """Copy ``part`` into the memory of ``target``, and tell nobody yet."""
        found = await self._pool.copy(
            [_tensor(part)], [_tensor(target)], digest=self._digest
        )
        target.moved_bytes = part.moved_bytes = part.memory.nbytes
        target.known_digest = found[0]
        part.known_digest = part.known_digest or found[0]

    async def leave(self, part: Part) -> None:
        """Tell of ``part`` with its digest; its bytes go nowhere."""
        if self._digest and not part.known_digest:
            (part.known_digest,) = await self._pool.digest([_tensor(part)])
        part.complete()


def _tensor(part: Part) -> torch.Tensor | Runs:
    return tensor_in(part.memory, TensorSpec((part.memory.nbytes,), "uint8"))
