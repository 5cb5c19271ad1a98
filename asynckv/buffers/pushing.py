"""The asking side of one remote ``open_insert``: tensors leave one by one."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

import torch

from asynckv.abc import InsertWriter
from asynckv.buffers.answers import Answer, fail_by
from asynckv.buffers.asking import ANSWER_S
from asynckv.buffers.declared import Declared
from asynckv.buffers.drafts import Draft
from asynckv.buffers.manifest import INLINE_NBYTES, check_body, pack
from asynckv.errors import EntryAborted, PeerLost
from asynckv.links.link import Link
from asynckv.protocol.digests import digest_of
from asynckv.protocol.frames import (
    Accepted,
    Cancel,
    Cancelled,
    Commit,
    Frame,
    Insert,
    Push,
    Retract,
)
from asynckv.protocol.payload_frames import Done, Grant
from asynckv.protocol.values import TensorRecord
from asynckv.tensors.blocks import KVBlocks, KVMemory, memory_of, rows_of, spec_in
from asynckv.tensors.copying import CopyPool
from asynckv.tensors.device_tensors import gpu_of
from asynckv.tensors.on_gpu import KVOnGpu
from asynckv.tensors.runs import Memory, joined

__all__ = ("BUSY_BYTES", "RemoteWriter", "dense", "lendable")

BUSY_BYTES: Final = 4 * 2**20
"""With so much unwritten for a peer, the next small tensor waits its turn."""


async def dense(tensor: torch.Tensor | KVOnGpu, pool: CopyPool) -> torch.Tensor:
    """Return ``tensor`` if its memory is its elements in order, else a copy.

    Of what is on a GPU it is a copy in host memory.
    """
    if isinstance(tensor, KVOnGpu) or tensor.is_cuda:
        return await _copy_of(tensor, pool)
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor.detach()
    return await _copy_of(tensor, pool)


async def _copy_of(memory: KVMemory | KVOnGpu, pool: CopyPool) -> torch.Tensor:
    copy = pool.host_empty(spec_in(memory))
    await pool.copy([memory], [copy], digest=False)
    return copy


async def lendable(memory: KVMemory | KVOnGpu, pool: CopyPool) -> KVMemory:
    """Return what lanes can read as it lies: ``memory`` itself, if it is blocks or
    dense, or a tensor of contiguous rows; else a copy.
    """
    if isinstance(memory, KVBlocks):
        is_on_gpu = gpu_of(memory.pool) is not None
        return await _copy_of(memory, pool) if is_on_gpu else memory
    if isinstance(memory, KVOnGpu) or memory.is_cuda:
        return await dense(memory, pool)
    return rows_of(memory) or await dense(memory, pool)


class RemoteWriter(InsertWriter):
    """Sends each tensor to the buffer at the other end of ``link``.

    A streaming entry does not survive its link.
    """

    def __init__(self, link: Link, draft: Draft, pool: CopyPool) -> None:
        self.entry_id = draft.entry_id
        self._link = link
        self._pool = pool
        self._indexes = {name: i for i, name in enumerate(draft.specs)}
        self._declared = Declared(draft.specs)
        self._is_closed = False
        transfer = link.new_transfer()
        self._answer: Answer[None] = Answer()
        self._room: Answer[bool] = Answer()
        self._grants = {transfer: self._room}
        frame = Insert(
            entry_id=draft.entry_id,
            transfer=transfer,
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

    async def put(self, name: str, tensor: KVMemory) -> None:
        if self._is_closed:
            raise RuntimeError("the writer was left already")
        with self._declared.putting(name, tensor):
            self._answer.check()
            await self._push(self._indexes[name], await lendable(tensor, self._pool))

    def check_whole(self) -> None:
        """Refuse to commit what is not whole.

        :raises ValueError: a declared tensor was never put, or is still being put
        """
        self._declared.check_whole()

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
                if transfer in self._grants:
                    self._grants.pop(transfer).give(isinstance(frame, Grant))
            case Accepted():
                self._answer.give(None)
                for grant in self._take_grants():
                    grant.give(False)  # acknowledged early: nobody needs the rest
            case Cancelled():
                self._fail(EntryAborted(reason="producer"))
            case _:
                fail_by(frame, "insert", self._fail)

    def on_lost(self, error: PeerLost) -> None:
        self._fail(error)

    async def _push(self, part: int, tensor: KVMemory) -> None:
        memory = memory_of(tensor)
        await self._drained()
        if self._answer.is_in:
            return  # acknowledged early: nobody needs the rest, nor would grant it
        transfer = self._link.new_transfer()
        if memory.nbytes <= INLINE_NBYTES:
            view = joined(memory)
            digest = b"" if self._link.digest == "off" else digest_of(view)
            push = Push(transfer=transfer, part=part, inline=True, digest=digest)
            self._stream.send(push, view)
            return
        grant: Answer[bool] = Answer()
        self._grants[transfer] = grant
        self._stream.send(Push(transfer=transfer, part=part, inline=False))
        try:
            async with asyncio.timeout(ANSWER_S):
                is_wanted = await grant
            if is_wanted:
                digest = await self._send(transfer, memory)
                self._stream.send(Done(transfer, 0, digest))
        except BaseException:
            self._grants.pop(transfer, None)
            self._stream.send(Retract(transfer))
            await self._link.payload.quiesce(transfer)
            raise

    async def _drained(self) -> None:
        """Wait while a peer that reads slowly has much left to read."""
        while self._link.outgoing_bytes > BUSY_BYTES:
            drained: Answer[None] = Answer()
            self._link.call_when_drained(partial(drained.give, None))
            await drained
        self._answer.check()

    async def _send(self, transfer: int, memory: Memory) -> bytes:
        sent: Answer[bytes] = Answer()

        def done(digest: bytes, error: BaseException | None) -> None:
            if error is None:
                sent.give(digest)
            else:
                sent.fail(PeerLost(f"the payload was not sent: {error}"))

        self._link.payload.send(transfer, 0, memory, done)
        return await sent

    def _fail(self, error: Exception) -> None:
        self._answer.fail(error)  # raised by the next put, or by none
        for grant in self._take_grants():
            grant.fail(error)

    def _take_grants(self) -> list[Answer[bool]]:
        grants, self._grants = self._grants, {}
        return [*grants.values()]
