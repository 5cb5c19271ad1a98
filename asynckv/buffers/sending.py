"""A request that takes tensors along: from the caller's memory, or copies of them."""

from __future__ import annotations

from collections.abc import Sequence

from asynckv.buffers.gpu_staging import Source
from asynckv.buffers.leaving_parts import LeavingParts, OutwardWays
from asynckv.errors import PeerLost
from asynckv.links.answers import Answer, fail_by
from asynckv.links.link import Link
from asynckv.protocol.device_frames import GrantDevices
from asynckv.protocol.frames import (
    Accepted,
    Cancel,
    Frame,
    Insert,
    Put,
)
from asynckv.protocol.ipc_frames import GrantShared
from asynckv.protocol.payload_frames import Done, Grant

__all__ = ("Sending",)


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
