"""The asking side of one remote ``open_insert``: tensors leave one by one."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

import torch

from asynckv.abc import InsertWriter
from asynckv.buffers.asking import ANSWER_S
from asynckv.buffers.entries import Draft
from asynckv.buffers.manifest import INLINE_NBYTES, check_body, pack
from asynckv.buffers.streaming import check_put
from asynckv.errors import EntryAborted, PeerLost, RemoteProtocolError
from asynckv.links.link import Link
from asynckv.protocol.digests import digest_of
from asynckv.protocol.failures import from_failure
from asynckv.protocol.frames import (
    Accepted,
    Cancel,
    Cancelled,
    Commit,
    Done,
    Failure,
    Frame,
    Grant,
    Insert,
    Push,
    Retract,
    TensorRecord,
)
from asynckv.tensors.copying import CopyPool
from asynckv.tensors.views import bytes_of, empty_tensor, spec_of

__all__ = ("BUSY_BYTES", "RemoteWriter", "dense")

BUSY_BYTES: Final = 4 * 2**20
"""With so much unwritten for a peer, the next small tensor waits its turn."""


async def dense(tensor: torch.Tensor, pool: CopyPool) -> torch.Tensor:
    """Return ``tensor`` if its memory is its elements in order, else a copy."""
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor.detach()
    copy = empty_tensor(spec_of(tensor))
    await pool.copy([tensor], [copy], digest=False)
    return copy


class RemoteWriter(InsertWriter):
    """Sends each tensor to the buffer at the other end of ``link``.

    A streaming entry does not survive its link.
    """

    def __init__(self, link: Link, draft: Draft, pool: CopyPool) -> None:
        self.entry_id = draft.entry_id
        self._link = link
        self._specs = draft.specs
        self._pool = pool
        self._indexes = {name: i for i, name in enumerate(draft.specs)}
        self._put: set[str] = set()
        self._is_put: set[str] = set()
        self._is_closed = False
        self._transfer = link.new_transfer()
        self._grants: dict[int, asyncio.Future[bool]] = {}
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[None] = self._loop.create_future()
        self._grants[self._transfer] = self._room = self._loop.create_future()
        frame = Insert(
            entry_id=draft.entry_id,
            transfer=self._transfer,
            inline=False,
            streaming=True,
            ttl_s=draft.ttl_s,
            deliveries=draft.deliveries,
        )
        records = [TensorRecord(name, spec) for name, spec in draft.specs.items()]
        body = pack(records, draft.input_tokens, draft.roi)
        check_body(link.limits.max_body_bytes, body)
        self._stream = link.open_stream(self, frame, body)

    async def granted(self) -> None:
        """Wait for room at the buffer."""
        await self._room

    async def put(self, name: str, tensor: torch.Tensor) -> None:
        if self._is_closed:
            raise RuntimeError("the writer was left already")
        check_put(self._specs, self._put, name, tensor)
        self._check_alive()
        self._put.add(name)
        try:
            await self._push(self._indexes[name], await dense(tensor, self._pool))
        except BaseException:
            self._put.discard(name)
            raise
        self._is_put.add(name)

    def check_whole(self) -> None:
        """Refuse to commit what is not whole.

        :raises ValueError: a declared tensor was never put, or is still being put
        """
        missing = [name for name in self._indexes if name not in self._is_put]
        if missing:
            raise ValueError(
                f"{len(missing)} declared tensors were not put: "
                f"{', '.join(missing[:5])}; the entry is aborted"
            )

    async def commit(self) -> None:
        """Wait until the entry is in. Cancelling it takes the entry back, if it is
        not in yet.
        """
        self._is_closed = True
        self._stream.send(Commit())
        await self._answer

    def cancel(self) -> None:
        """Abort the entry. Never waits."""
        self._is_closed = True
        self._stream.send(Cancel())

    def on_frame(self, frame: Frame, body: bytes) -> None:
        match frame:
            case Grant(transfer=transfer) | Retract(transfer=transfer):
                grant = self._grants.pop(transfer, None)
                if grant is not None and not grant.done():
                    grant.set_result(isinstance(frame, Grant))
            case Accepted():
                self._end(None)
            case Cancelled():
                self._end(EntryAborted(reason="producer"))
            case Failure():
                self._end(from_failure(frame))
            case _:
                error = RemoteProtocolError(f"no {type(frame).__name__} belongs here")
                self._end(error)  # of a last frame's stream nobody else is told
                raise error

    def on_lost(self, error: PeerLost) -> None:
        self._end(error)

    async def _push(self, part: int, tensor: torch.Tensor) -> None:
        view = bytes_of(tensor)
        await self._drained()
        transfer = self._link.new_transfer()
        if len(view) <= INLINE_NBYTES:
            digest = b"" if self._link.digest == "off" else digest_of(view)
            push = Push(transfer=transfer, part=part, inline=True, digest=digest)
            self._stream.send(push, view)
            return
        grant: asyncio.Future[bool] = self._loop.create_future()
        self._grants[transfer] = grant
        self._stream.send(Push(transfer=transfer, part=part, inline=False))
        try:
            async with asyncio.timeout(ANSWER_S):
                is_wanted = await grant
            if is_wanted:
                digest = await self._send(transfer, view)
                self._stream.send(Done(transfer, 0, digest))
        except BaseException:
            self._grants.pop(transfer, None)
            self._stream.send(Retract(transfer))
            await self._link.payload.quiesce(transfer)
            raise

    async def _drained(self) -> None:
        """Wait while a peer that reads slowly has much left to read."""
        while self._link.outgoing_bytes > BUSY_BYTES:
            drained: asyncio.Future[None] = self._loop.create_future()
            self._link.call_when_drained(partial(_wake, drained))
            await drained
        self._check_alive()

    async def _send(self, transfer: int, view: memoryview) -> bytes:
        sent: asyncio.Future[bytes] = self._loop.create_future()

        def done(digest: bytes, error: BaseException | None) -> None:
            if sent.done():
                return
            if error is None:
                sent.set_result(digest)
            else:
                sent.set_exception(PeerLost(f"the payload was not sent: {error}"))

        self._link.payload.send(transfer, 0, view, done)
        return await sent

    def _check_alive(self) -> None:
        if self._answer.done() and not self._answer.cancelled():
            error = self._answer.exception()
            if error is not None:
                raise error

    def _end(self, error: Exception | None) -> None:
        if not self._answer.done():
            if error is None:
                self._answer.set_result(None)
            else:
                self._answer.set_exception(error)
                self._answer.exception()  # it is raised by the next put, or by none
        grants, self._grants = self._grants, {}
        for grant in grants.values():
            if grant.done():
                continue
            if error is None:
                grant.set_result(False)
            else:
                grant.set_exception(error)
                grant.exception()


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
