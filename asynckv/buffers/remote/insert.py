"""The asking side of remote inserts: whole ones, and tensors that leave one by one.

A request takes tensors along from the caller's memory, or copies of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final, Protocol, TypeAlias

import torch

from asynckv.buffers.entries.entries import Draft
from asynckv.buffers.local.writer import Declared
from asynckv.buffers.remote.connection import ANSWER_S
from asynckv.errors import EntryAborted, PeerLost
from asynckv.links.answers import Answer, fail_by
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
    Put,
    Retract,
)
from asynckv.protocol.transfer_frames import Done, Grant, GrantDevices, GrantShared
from asynckv.protocol.values import TensorRecord
from asynckv.tensors.blocks import KVBlocks, KVMemory, memory_of, rows_of, spec_in
from asynckv.tensors.copying import CopyPool
from asynckv.tensors.device_tensors import gpu_of
from asynckv.tensors.on_gpu import KVOnGpu
from asynckv.tensors.runs import joined
from asynckv.transfers.manifest import INLINE_NBYTES, check_body, content_digest, pack
from asynckv.transfers.outgoing import LeavingParts, OutwardWays
from asynckv.transfers.staging import (
    GpuRoom,
    GpuStaging,
    Source,
    StagedTensor,
    StagingWriter,
    are_staged,
    gpu_source,
    release_staged,
    until_made,
)
from asynckv.types import TensorSpec

__all__ = (
    "BUSY_BYTES",
    "PushingBy",
    "RemoteWriter",
    "Sending",
    "begin_insert",
    "dense",
    "lendable",
    "source_of",
)


class Sending:
    """One entry or value on its way to the buffer at the other end of ``link``.

    Tensors of few bytes are in ``body``; ``sources`` of the others are sent once
    they are granted, and stay untouched until :meth:`accepted` has ended.
    ``digests`` are theirs where they are known already. ``may_be_in`` once the
    peer has what it needs to commit it, and to hand it on.
    """

    def __init__(
        self,
        link: Link,
        frame: Insert | Put,
        body: bytes | memoryview,
        sources: Sequence[Source],
        digests: Sequence[bytes] | None = None,
        ways: OutwardWays | None = None,
    ) -> None:
        self.may_be_in = frame.inline
        self._link = link
        self._transfer = frame.transfer
        self._request = type(frame).__name__.lower()
        self._answer: Answer[None] = Answer()
        self._stream = link.open_stream(self, frame, body)
        self._leaving = LeavingParts(
            *(self._stream, frame.transfer, sources, digests, ways),
            left=self._left,
            failed=self._answer.fail,
        )

    async def accepted(self) -> bool:
        """Wait until the peer has it, or ``False`` if the link was lost before.

        Cancelled, it is withdrawn, if it is not in yet. However this ends, no
        thread reads the tensors any more.

        :raises Exception: what the peer says
        :raises GPUFailed: what is on this side's GPU cannot be read back
        """
        try:
            await self._answer
        except PeerLost:
            await self.quiesce()
            if self._link.is_open:
                raise  # the peer says so, of something else
            return False
        except BaseException:
            self.cancel()
            await self.quiesce()
            raise
        if self._leaving.is_busy:
            await self.quiesce()
        return True

    def cancel(self) -> None:
        """Withdraw it, if it is not in yet. Never waits."""
        self._stream.send(Cancel())
        self._leaving.stop()

    async def quiesce(self) -> None:
        """Wait until no thread reads the tensors (shielded).

        As long as :meth:`LeavingParts.quiesce` does.
        """
        await self._leaving.quiesce()

    def on_frame(self, frame: Frame, body: bytes) -> None:
        match frame:
            case Grant(transfer=self._transfer):
                self.may_be_in = True
                self._leaving.on_grant()
            case GrantDevices(transfer=self._transfer):
                self.may_be_in = True
                self._leaving.on_grant_devices(frame)
            case GrantShared(transfer=self._transfer):
                self.may_be_in = True
                self._leaving.on_grant_shared(frame)
            case Accepted():
                self._leaving.end()
                self._leaving.let_go()
                self._answer.give(None)
            case _:
                self._leaving.let_go()  # the last word, or the link ends
                fail_by(frame, self._request, self._answer.fail)

    def on_lost(self, error: PeerLost) -> None:
        self._answer.fail(error)

    def _left(self, index: int, digest: bytes, error: BaseException | None) -> None:
        if error is None:  # else the link ends
            self._stream.send(Done(self._transfer, index, digest))


def begin_insert(
    link: Link,
    draft: Draft,
    sources: Sequence[Source],
    digests: Sequence[bytes] | None,
    ways: OutwardWays | None = None,
) -> Sending:
    """Ask for an entry to be put in. ``sources`` are dense, or blocks; some are read on
    a GPU only if there are too many bytes to ride. Never waits.

    :raises EntryTooLarge: tokens, roi and names do not fit in one frame
    """
    inline = sum(source.nbytes for source in sources) <= INLINE_NBYTES
    views = [joined(memory_of(source)) for source in _in_host(sources) if inline]
    if link.digest == "off":
        # Equal is then what has equal tokens, names and shapes.
        digests = [b""] * len(sources)
    elif inline and digests is None:
        digests = [digest_of(view) for view in views]
    records = [
        TensorRecord(name, spec, b"" if digests is None else digests[i])
        for i, (name, spec) in enumerate(draft.specs.items())
    ]
    tokens = draft.input_tokens, draft.roi
    frame = Insert(
        entry_id=draft.entry_id,
        transfer=link.new_transfer(),
        inline=inline,
        ttl_s=draft.ttl_s,
        deliveries=draft.deliveries,
        digest=b"" if digests is None else content_digest(records, *tokens),
        on_gpu=are_staged(sources),
    )
    body = pack(records, *tokens, views)
    check_body(link.limits.max_body_bytes, body)
    return Sending(link, frame, body, sources, digests, ways)


def _in_host(sources: Sequence[Source]) -> list[KVMemory]:
    return [s for s in sources if not isinstance(s, StagedTensor | KVOnGpu)]


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


async def source_of(
    memory: KVMemory | KVOnGpu,
    pool: CopyPool,
    staging: GpuStaging | None,
    nbytes: int,
) -> Source:
    """Return what can be sent as it lies, of a request of ``nbytes``: what is read on a
    GPU (see :func:`~asynckv.transfers.staging.gpu_source`), else as :func:`lendable`.
    """
    return await gpu_source(memory, staging, nbytes) or await lendable(memory, pool)


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


class PushingBy(OutwardWays, Protocol):
    """Whoever has a GPU, too, that tensors may be copied on."""

    def staging(self, nbytes: int) -> GpuStaging | None:
        """Return where copies are made of what goes to a peer's GPU, if it may."""

    @property
    def room(self) -> GpuRoom | None:
        """Where else what goes there is made, if this side has memory of a GPU."""


_OfOne: TypeAlias = Grant | GrantDevices | GrantShared | Retract | Done


class _Pushing:
    """One tensor on its way."""

    def __init__(self, writer: RemoteWriter, transfer: int, source: Source) -> None:
        self._transfer = transfer
        self.granted: Answer[None] = Answer()
        self.over: Answer[Done | None] = Answer()
        """The last word to be said of it; none if nobody needs it."""
        self.is_left = False
        """Whether all of it has left by the link's payload."""
        self.leaving = LeavingParts(
            *(writer.stream, transfer, [source], None, writer.by),
            left=self._left,
            failed=self.fail,
        )

    def on_frame(self, frame: _OfOne) -> None:
        """The peer has memory for it; or does not need it, or has it on its GPU."""
        self.granted.give(None)
        if isinstance(frame, Grant):
            self.leaving.on_grant()
        elif isinstance(frame, GrantDevices):
            self.leaving.on_grant_devices(frame)
        elif isinstance(frame, GrantShared):
            self.leaving.on_grant_shared(frame)
        else:
            self.leaving.let_go()
            self.end(Done(self._transfer, 0) if isinstance(frame, Done) else None)

    def end(self, last: Done | None) -> None:
        """The peer has it, or does not need it."""
        self.granted.give(None)
        self.over.give(last)

    def fail(self, error: Exception) -> None:
        """It will never be there."""
        self.granted.fail(error)
        self.over.fail(error)

    def _left(self, index: int, digest: bytes, error: BaseException | None) -> None:
        if error is None:
            self.is_left = True
            self.over.give(Done(self._transfer, index, digest))
        else:
            self.fail(PeerLost(f"the payload was not sent: {error}"))


class RemoteWriter(StagingWriter):
    """Sends each tensor to the buffer at the other end of ``link``.

    A streaming entry does not survive its link.
    """

    def __init__(self, link: Link, draft: Draft, by: PushingBy) -> None:
        self.entry_id = draft.entry_id
        self.by = by
        self._link = link
        self._indexes = {name: i for i, name in enumerate(draft.specs)}
        self._declared = Declared(draft.specs)
        self._is_closed = False
        self._transfer = link.new_transfer()
        self._answer: Answer[None] = Answer()
        self._room: Answer[None] = Answer()
        self._pushing: dict[int, _Pushing] = {}
        self._unread: dict[int, LeavingParts] = {}
        """Of puts that were cancelled: the peer has not said yet that it is through."""
        self._waiting = set[Answer[list[StagedTensor]]]()
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
        self.stream = link.open_stream(self, frame, body)

    async def granted(self) -> None:
        """Wait for room at the buffer."""
        await self._room

    async def put(self, name: str, tensor: KVMemory) -> None:
        if self._is_closed:
            raise RuntimeError("the writer was left already")
        with self._declared.putting(name, tensor):
            self._answer.check()
            pool, nbytes = self.by.pool, tensor.nbytes
            memory, staging = pool.catch(tensor), self.by.staging(nbytes)
            source = await source_of(memory, pool, staging, nbytes)
            try:
                await until_made([source], pool)
                await self._push(self._indexes[name], source)
            finally:
                release_staged([source])

    async def room(self, specs: Sequence[TensorSpec]) -> list[StagedTensor] | None:
        self._answer.check()
        least = min((spec.nbytes for spec in specs), default=0)
        room = None if self.by.staging(least) is None else self.by.room
        return None if room is None else await room.take(specs, self._waiting)

    async def put_staged(self, name: str, staged: StagedTensor) -> None:
        if self._is_closed:
            raise RuntimeError("the writer was left already")
        with self._declared.putting(name, staged):
            self._answer.check()
            await self._push(self._indexes[name], staged)

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
        self.stream.send(Commit())
        await self._answer

    def cancel(self) -> None:
        """Abort the entry. Never waits."""
        self._is_closed = True
        self.stream.send(Cancel())

    def on_frame(self, frame: Frame, body: bytes) -> None:
        match frame:
            case Grant(transfer=self._transfer):
                self._room.give(None)
            case Grant() | GrantDevices() | GrantShared() | Retract() | Done():
                if (pushing := self._pushing.get(frame.transfer)) is not None:
                    pushing.on_frame(frame)
                elif (leaving := self._unread.pop(frame.transfer, None)) is not None:
                    leaving.let_go()
            case Accepted():
                self._let_go()
                self._answer.give(None)
                self._room.give(None)
                for pushing in self._pushing.values():
                    pushing.end(None)  # acknowledged early: nobody needs the rest
            case Cancelled():
                self._let_go()
                self._fail(EntryAborted(reason="producer"))
            case _:
                self._let_go()  # the last word, or the link ends
                fail_by(frame, "insert", self._fail)

    def on_lost(self, error: PeerLost) -> None:
        self._fail(error)

    async def _push(self, part: int, source: Source) -> None:
        await self._drained()
        if self._answer.is_in:
            return  # acknowledged early: nobody needs the rest, nor would grant it
        transfer = self._link.new_transfer()
        if source.nbytes <= INLINE_NBYTES and not isinstance(
            source, StagedTensor | KVOnGpu
        ):
            view = joined(memory_of(source))
            digest = b"" if self._link.digest == "off" else digest_of(view)
            push = Push(transfer=transfer, part=part, inline=True, digest=digest)
            self.stream.send(push, view)
            return
        self._pushing[transfer] = pushing = _Pushing(self, transfer, source)
        on_gpu = isinstance(source, StagedTensor)
        push = Push(transfer=transfer, part=part, inline=False, on_gpu=on_gpu)
        self.stream.send(push)
        try:
            async with asyncio.timeout(ANSWER_S):
                await pushing.granted
            last = await pushing.over
            if not pushing.is_left or pushing.leaving.is_busy:
                await pushing.leaving.quiesce()
        except BaseException:
            self.stream.send(Retract(transfer))
            await pushing.leaving.quiesce()
            raise
        finally:
            del self._pushing[transfer]
            pushing.leaving.end()
            if pushing.leaving.is_read:
                self._unread[transfer] = pushing.leaving
        if last is not None:
            # Nobody is shown it before: a cancelled put has put nothing.
            self.stream.send(last)

    def _let_go(self) -> None:
        """The peer is through with all that it was shown."""
        for leaving in self._unread.values():
            leaving.let_go()
        self._unread.clear()
        for pushing in self._pushing.values():
            pushing.leaving.let_go()

    async def _drained(self) -> None:
        """Wait while a peer that reads slowly has much left to read."""
        while self._link.outgoing_bytes > BUSY_BYTES:
            drained: Answer[None] = Answer()
            self._link.call_when_drained(partial(drained.give, None))
            await drained
        self._answer.check()

    def _fail(self, error: Exception) -> None:
        self._answer.fail(error)  # raised by the next put, or by none
        self._room.fail(error)
        for waiting in self._waiting:
            waiting.fail(error)
        for pushing in self._pushing.values():
            pushing.fail(error)
