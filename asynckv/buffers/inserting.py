"""The asking side of one remote ``insert``: lanes read the caller's memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import torch

from asynckv.buffers.entries import Draft
from asynckv.buffers.manifest import INLINE_NBYTES, check_body, content_digest, pack
from asynckv.errors import AsyncKVError, PeerLost, RemoteProtocolError
from asynckv.links.link import Link
from asynckv.protocol.digests import digest_of
from asynckv.protocol.failures import from_failure
from asynckv.protocol.frames import (
    Accepted,
    Cancel,
    Cancelled,
    Done,
    Failure,
    Frame,
    Grant,
    Insert,
    TensorRecord,
)
from asynckv.tensors.views import bytes_of

__all__ = ("Inserting",)


class Inserting:
    """One entry on its way to the buffer at the other end of ``link``.

    ``tensors`` are dense and stay untouched until :meth:`quiesce`; ``digests``
    are theirs where they are known already.
    """

    def __init__(
        self,
        link: Link,
        draft: Draft,
        tensors: Sequence[torch.Tensor],
        digests: Sequence[bytes] | None,
    ) -> None:
        self.was_granted = False
        self._link = link
        self._views = [bytes_of(tensor) for tensor in tensors]
        inline = sum(len(view) for view in self._views) <= INLINE_NBYTES
        if link.digest == "off":
            # Equal is then what has equal tokens, names and shapes.
            digests = [b""] * len(self._views)
        elif inline and digests is None:
            digests = [digest_of(view) for view in self._views]
        self._digests = digests
        self._is_cancelled = False
        self._transfer = link.new_transfer()
        self._answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        records = [
            TensorRecord(name, spec, b"" if digests is None else digests[i])
            for i, (name, spec) in enumerate(draft.specs.items())
        ]
        tokens = draft.input_tokens, draft.roi
        frame = Insert(
            entry_id=draft.entry_id,
            transfer=self._transfer,
            inline=inline,
            ttl_s=draft.ttl_s,
            deliveries=draft.deliveries,
            digest=b"" if digests is None else content_digest(records, *tokens),
        )
        body = pack(records, *tokens, self._views if inline else ())
        check_body(link.limits.max_body_bytes, body)
        self._stream = link.open_stream(self, frame, body)

    async def accepted(self) -> None:
        """Wait until the entry is in, or was taken.

        :raises Exception: what the peer says, or ``PeerLost``
        """
        await self._answer

    def cancel(self) -> None:
        """Take the entry back if it is not in yet. Never waits."""
        self._is_cancelled = True
        self._stream.send(Cancel())
        self._link.payload.stop(self._transfer)

    async def quiesce(self) -> None:
        """Wait until no thread reads the tensors (at most 1 s; shielded)."""
        await self._link.payload.quiesce(self._transfer)

    def on_frame(self, frame: Frame, body: bytes) -> None:
        match frame:
            case Grant(transfer=self._transfer):
                self.was_granted = True
                if not self._is_cancelled:
                    self._send()
            case Accepted():
                self._end(None)
            case Cancelled():
                self._end(AsyncKVError("the peer gave the insert up"))
            case Failure():
                self._end(from_failure(frame))
            case _:
                error = RemoteProtocolError(f"no {type(frame).__name__} belongs here")
                self._end(error)  # of a last frame's stream nobody else is told
                raise error

    def on_lost(self, error: PeerLost) -> None:
        self._end(error)

    def _send(self) -> None:
        for index, view in enumerate(self._views):
            self._link.payload.send(
                self._transfer,
                index,
                view,
                partial(self._sent, index),
                digest=None if self._digests is None else self._digests[index],
            )

    def _sent(self, index: int, digest: bytes, error: BaseException | None) -> None:
        if error is None and not self._answer.done():
            self._stream.send(Done(self._transfer, index, digest))

    def _end(self, error: Exception | None) -> None:
        if self._answer.done():
            return
        if error is None:
            self._answer.set_result(None)
        else:
            self._answer.set_exception(error)
            self._answer.exception()  # who inserts may have been cancelled meanwhile
