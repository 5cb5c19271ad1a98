"""A request that takes tensors along: lanes read them from the caller's memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from asynckv.buffers.answers import Answer, fail_by
from asynckv.errors import PeerLost
from asynckv.links.link import Link
from asynckv.links.riding import RidingParts, rides
from asynckv.protocol.frames import (
    Accepted,
    Cancel,
    Frame,
    Insert,
    Put,
)
from asynckv.protocol.payload_frames import Done, Grant
from asynckv.tensors.runs import Memory, joined

__all__ = ("Sending",)


class Sending:
    """One entry or value on its way to the buffer at the other end of ``link``.

    Tensors of few bytes are in ``body``; ``views`` of the others are sent once
    they are granted, and stay untouched until :meth:`accepted` has ended.
    ``digests`` are theirs where they are known already. ``may_be_in`` once the
    peer has what it needs to commit it, and to hand it on.
    """

    _riding: RidingParts | None = None

    def __init__(
        self,
        link: Link,
        frame: Insert | Put,
        body: bytes | memoryview,
        views: Sequence[Memory],
        digests: Sequence[bytes] | None = None,
    ) -> None:
        self.may_be_in = frame.inline
        self._link = link
        self._views = views
        self._digests = digests
        self._transfer = frame.transfer
        self._is_cancelled = False
        self._request = type(frame).__name__.lower()
        self._answer: Answer[None] = Answer()
        self._stream = link.open_stream(self, frame, body)

    async def accepted(self) -> bool:
        """Wait until the peer has it, or ``False`` if the link was lost before.

        Cancelled, it is withdrawn, if it is not in yet. However this ends, no
        thread reads the tensors any more.

        :raises Exception: what the peer says
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
        finally:
            self._views = ()  # whoever keeps this object keeps no memory
        return True

    def cancel(self) -> None:
        """Withdraw it, if it is not in yet. Never waits."""
        self._is_cancelled = True
        self._stop_riding()
        self._stream.send(Cancel())
        self._link.payload.stop(self._transfer)

    async def quiesce(self) -> None:
        """Wait until no thread reads the tensors (at most 1 s; shielded)."""
        self._stop_riding()
        await self._link.payload.quiesce(self._transfer)

    def on_frame(self, frame: Frame, body: bytes) -> None:
        match frame:
            case Grant(transfer=self._transfer):
                self.may_be_in = True
                if not self._is_cancelled:
                    self._send()
            case Accepted():
                self._stop_riding()
                self._answer.give(None)
            case _:
                fail_by(frame, self._request, self._answer.fail)

    def on_lost(self, error: PeerLost) -> None:
        self._answer.fail(error)

    def _send(self) -> None:
        riding = RidingParts(self._link, self._stream, self._transfer)
        for index, view in enumerate(self._views):
            digest = None if self._digests is None else self._digests[index]
            if rides(view.nbytes):
                riding.add(index, view.nbytes, partial(joined, view), digest)
                continue
            sent = partial(self._sent, index)
            self._link.payload.send(self._transfer, index, view, sent, digest=digest)
        self._riding = riding

    def _stop_riding(self) -> None:
        if self._riding is not None:
            self._riding.stop()

    def _sent(self, index: int, digest: bytes, error: BaseException | None) -> None:
        if error is None and not self._answer.is_in:
            self._stream.send(Done(self._transfer, index, digest))
