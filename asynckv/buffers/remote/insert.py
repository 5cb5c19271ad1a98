"""The asking side of remote inserts: whole ones, and tensors that leave one by one.

A request takes tensors along from the caller's memory, or copies of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final, TypeAlias

from asynckv.buffers.entries.entries import Draft
from asynckv.buffers.local.writer import Declared, spec_put
from asynckv.buffers.remote.connection import ANSWER_S
from asynckv.errors import EntryAborted, PeerLost
from asynckv.links.link import Link
from asynckv.protocol.failures import fail_by
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
from asynckv.protocol.transfer_frames import Grant, Sent
from asynckv.protocol.wire import digest_of
from asynckv.tensors.blocks import KVMemory
from asynckv.tensors.runs import joined
from asynckv.transfers.manifest import INLINE_NBYTES, check_body, content_digest, pack
from asynckv.transfers.outgoing import Outgoing, ignore_grant
from asynckv.transfers.routes import PeerRoutes, StagingWriter
from asynckv.transfers.source import (
    Source,
    StagedTensor,
    are_on_gpu,
    release_staged,
    source_of,
    until_made,
)
from asynckv.types import TensorSpec
from asynckv.waits.waiting import Reply

__all__ = (
    "BUSY_BYTES",
    "RemoteSend",
    "RemoteWriter",
    "begin_insert",
)


class RemoteSend:
    """One entry or value on its way to the buffer at the other end of ``link``.

    Tensors of few bytes are in ``body``; ``sources`` of the others are sent once
    they are granted, and stay untouched until :meth:`accepted` has ended.
    ``may_be_in`` once the peer has what it needs to commit it, and to hand it on.
    """

    def __init__(
        self,
        link: Link,
        frame: Insert | Put,
        body: bytes | memoryview,
        sources: Sequence[Source],
        routes: PeerRoutes | None = None,
        *,
        is_on_gpu: bool = False,
    ) -> None:
        self.may_be_in = frame.inline
        self._link = link
        self._request = type(frame).__name__.lower()
        self._answer: Reply[None] = Reply()
        self._stream = link.open_stream(self, frame, body)
        self._transfer = frame.transfer
        self._sources: Sequence[Source] | None = sources
        self._routes = routes
        self._is_on_gpu = is_on_gpu
        self._outgoing: Outgoing | None = None

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
        if self._outgoing is not None and self._outgoing.is_busy:
            await self.quiesce()
        return True

    def cancel(self) -> None:
        """Withdraw it, if it is not in yet. Never waits."""
        self._stream.send(Cancel())
        self._stop()

    async def quiesce(self) -> None:
        """Wait until no thread reads the tensors (shielded).

        As long as :meth:`Outgoing.quiesce` does.
        """
        self._stop()
        if self._outgoing is not None:
            await self._outgoing.quiesce()

    def on_frame(self, frame: Frame, body: bytes) -> None:
        match frame:
            case Grant():
                self.may_be_in = True
                self._on_grant(frame)
            case Accepted():
                self._stop()
                self._release()
                self._answer.give(None)
            case _:
                self._release()  # the last word, or the link ends
                fail_by(frame, self._request, self._answer.fail)

    def on_lost(self, error: PeerLost) -> None:
        self._answer.fail(error)

    def _on_grant(self, frame: Grant) -> None:
        if self._sources is None:
            ignore_grant(frame, self._link)
            return
        if self._outgoing is None:
            self._outgoing = Outgoing(
                *(self._stream, self._transfer, self._routes),
                failed=self._answer.fail,
                is_on_gpu=self._is_on_gpu,
                importer=None if self._routes is None else self._routes.importer,
            )
            for part, source in enumerate(self._sources):
                self._outgoing.add(part, source)
        self._outgoing.on_grant(frame)

    def _stop(self) -> None:
        """Nothing more is sent."""
        self._sources = None
        if self._outgoing is not None:
            self._outgoing.stop()

    def _release(self) -> None:
        """The peer reads nothing of it any more."""
        if self._outgoing is not None:
            self._outgoing.release()


def begin_insert(
    link: Link,
    draft: Draft,
    sources: Sequence[Source],
    routes: PeerRoutes | None = None,
) -> RemoteSend:
    """Ask for an entry to be put in. Some ``sources`` are read on a GPU only if there
    are too many bytes to leave with the request. Never waits.

    :raises EntryTooLarge: tokens, roi and names do not fit in one frame
    """
    inline = draft.layout.nbytes <= INLINE_NBYTES
    is_digested = link.digest != "off"  # else equal names and shapes are equal
    views: list[memoryview] = []
    digests: list[bytes] = []
    for source in sources:
        if inline:
            views.append(view := joined(source.host()))
            if is_digested and not source.digest:
                source.digest = digest_of(view)
        digests.append(source.digest if is_digested else b"")
    are_known = all(digests) or not is_digested
    contents = draft.layout, digests, draft.input_tokens, draft.roi
    head = pack(*contents)
    regions = [source.region for source in sources]
    on_gpu = not inline and are_on_gpu(draft.layout.sizes, regions)
    frame = Insert(
        entry_id=draft.entry_id,
        transfer=link.new_transfer(),
        inline=inline,
        ttl_s=draft.ttl_s,
        deliveries=draft.deliveries,
        digest=content_digest(*contents, head) if are_known else b"",
        on_gpu=on_gpu,
    )
    body = b"".join((head, *views))
    check_body(link.limits.max_body_bytes, body)
    return RemoteSend(link, frame, body, sources, routes, is_on_gpu=on_gpu)


BUSY_BYTES: Final = 4 * 2**20
"""With so much unwritten for a peer, the next small tensor waits its turn."""


_OfOne: TypeAlias = Grant | Retract | Sent


class _Push:
    """One tensor on its way. ``over`` is the last word to be said of it, if any is."""

    def __init__(
        self, writer: RemoteWriter, transfer: int, source: Source, *, is_on_gpu: bool
    ) -> None:
        self.granted: Reply[None] = Reply()
        self.over: Reply[Sent | None] = Reply()
        self.outgoing = Outgoing(
            writer.stream,
            transfer,
            writer.routes,
            failed=self.fail,
            is_on_gpu=is_on_gpu,
            importer=writer.routes.importer,
            sent=self.over.give,
        )
        self.outgoing.add(0, source)

    def on_frame(self, frame: _OfOne) -> None:
        """The peer has memory for it; or does not need it, or has it on its GPU."""
        self.granted.give(None)
        if isinstance(frame, Retract | Sent):
            self.outgoing.release()
            self.end(frame if isinstance(frame, Sent) else None)
        else:
            self.outgoing.on_grant(frame)

    def end(self, last: Sent | None) -> None:
        """The peer has it, or does not need it."""
        self.granted.give(None)
        self.over.give(last)

    def fail(self, error: Exception) -> None:
        """It will never be there."""
        self.granted.fail(error)
        self.over.fail(error)


class RemoteWriter(StagingWriter):
    """Sends each tensor to the buffer at the other end of ``link``.

    A streaming entry does not survive its link.
    """

    def __init__(self, link: Link, draft: Draft, routes: PeerRoutes) -> None:
        self.entry_id = draft.entry_id
        self.routes = routes
        self._link = link
        self._indexes = {name: i for i, name in enumerate(draft.layout.specs)}
        self.declared = Declared(draft.layout.specs)
        self._transfer = link.new_transfer()
        self._answer: Reply[None] = Reply()
        self._room: Reply[None] = Reply()
        self._pushes: dict[int, _Push] = {}
        self._unread: dict[int, Outgoing] = {}
        """Of puts that were cancelled: the peer has not said yet that it is through."""
        self._waiting = set[Reply[list[StagedTensor]]]()
        frame = Insert(
            entry_id=draft.entry_id,
            transfer=self._transfer,
            inline=False,
            streaming=True,
            ttl_s=draft.ttl_s,
            deliveries=draft.deliveries,
        )
        digests = [b""] * len(draft.layout.sizes)
        body = pack(draft.layout, digests, draft.input_tokens, draft.roi)
        check_body(link.limits.max_body_bytes, body)
        self.stream = link.open_stream(self, frame, body)

    async def granted(self) -> None:
        """Wait for room at the buffer."""
        await self._room

    async def put(self, name: str, tensor: KVMemory) -> None:
        with self.declared.putting(name, spec_put(name, tensor)):
            self._answer.check()
            pool, nbytes = self.routes.pool, tensor.nbytes
            memory, staging = (
                pool.catch(tensor),
                self.routes.staging(self._link, nbytes),
            )
            source = await source_of(memory, pool, staging, nbytes)
            try:
                await until_made([source], pool)
                await self._push(self._indexes[name], source)
            finally:
                release_staged([source])

    async def room(self, specs: Sequence[TensorSpec]) -> list[StagedTensor] | None:
        self._answer.check()
        least = min((spec.nbytes for spec in specs), default=0)
        routes = self.routes
        room = None if routes.staging(self._link, least) is None else routes.room
        return None if room is None else await room.take(specs, self._waiting)

    async def put_staged(self, name: str, staged: StagedTensor) -> None:
        with self.declared.putting(name, staged.spec):
            self._answer.check()
            await self._push(self._indexes[name], staged)

    async def commit(self) -> None:
        """Wait until the entry is in. Cancelling it takes the entry back, if it is
        not in yet.
        """
        self.declared.is_closed = True
        self.stream.send(Commit())
        await self._answer

    def cancel(self) -> None:
        """Abort the entry. Never waits."""
        self.declared.is_closed = True
        self.stream.send(Cancel())

    def on_frame(self, frame: Frame, body: bytes) -> None:
        match frame:
            case Grant(transfer=self._transfer):
                self._room.give(None)
            case Grant() | Retract() | Sent():
                if (push := self._pushes.get(frame.transfer)) is not None:
                    push.on_frame(frame)
                elif (outgoing := self._unread.pop(frame.transfer, None)) is not None:
                    outgoing.release()
                elif not isinstance(frame, Retract | Sent):
                    ignore_grant(frame, self._link)
            case Accepted():
                self._release()
                self._answer.give(None)
                self._room.give(None)
                for push in self._pushes.values():
                    push.end(None)  # acknowledged early: nobody needs the rest
            case Cancelled():
                self._release()
                self._fail(EntryAborted(reason="producer"))
            case _:
                self._release()  # the last word, or the link ends
                fail_by(frame, "insert", self._fail)

    def on_lost(self, error: PeerLost) -> None:
        self._fail(error)

    async def _push(self, part: int, source: Source) -> None:
        await self._drained()
        if self._answer.is_in:
            return  # acknowledged early: nobody needs the rest, nor would grant it
        transfer = self._link.new_transfer()
        if source.nbytes <= INLINE_NBYTES and not source.is_on_gpu:
            view = joined(source.host())
            digest = b"" if self._link.digest == "off" else digest_of(view)
            inline = Push(transfer=transfer, part=part, inline=True, digest=digest)
            self.stream.send(inline, view)
            return
        is_on_gpu = are_on_gpu([source.nbytes], [source.region])
        push = _Push(self, transfer, source, is_on_gpu=is_on_gpu)
        outgoing, self._pushes[transfer] = push.outgoing, push
        self.stream.send(Push(transfer, part, inline=False, on_gpu=is_on_gpu))
        try:
            async with asyncio.timeout(ANSWER_S):
                await push.granted
            last = await push.over
            if outgoing.is_busy:
                await outgoing.quiesce()
        except BaseException:
            self.stream.send(Retract(transfer))
            await outgoing.quiesce()
            raise
        finally:
            del self._pushes[transfer]
            outgoing.stop()
            if outgoing.is_read:
                self._unread[transfer] = outgoing
        if last is not None:
            # Nobody is shown it before: a cancelled put has put nothing.
            self.stream.send(last)

    def _release(self) -> None:
        """The peer is through with all that it was shown."""
        for outgoing in self._unread.values():
            outgoing.release()
        self._unread.clear()
        for push in self._pushes.values():
            push.outgoing.release()

    async def _drained(self) -> None:
        """Wait while a peer that reads slowly has much left to read."""
        while self._link.outgoing_bytes > BUSY_BYTES:
            drained: Reply[None] = Reply()
            self._link.call_when_drained(partial(drained.give, None))
            await drained
        self._answer.check()

    def _fail(self, error: Exception) -> None:
        self._answer.fail(error)  # raised by the next put, or by none
        self._room.fail(error)
        for waiting in self._waiting:
            waiting.fail(error)
        for push in self._pushes.values():
            push.fail(error)
