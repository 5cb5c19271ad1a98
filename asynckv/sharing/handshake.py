"""The stream on which one side opens memory of the other: exposed, proved, accepted.

An example: a peer asks by ``OpenMemory`` for memory of a lookup buffer, hears in an
``Exposed`` where it is, opens it, says in a ``Proved`` what it has read there, and
hears ``Accepted``. The other way round, or both ways at once, it is the same.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Final, Self

from asynckv.errors import AsyncKVError, ConfigError, PeerLost, RemoteProtocolError
from asynckv.links.link import Link, LinkStream
from asynckv.protocol.failures import fail_by, to_failure
from asynckv.protocol.frames import Accepted, Cancel, Cancelled, Frame
from asynckv.protocol.transfer_frames import Exposed, OpenMemory, Proved
from asynckv.sharing.exporter import Importer
from asynckv.waits.waiting import Reply

__all__ = ("Handshake",)

_ACCEPT_S: Final = 10.0


class Handshake:
    """One side of it, as a context: whoever leaves it by an error says so.

    What the peer says is kept until it is awaited; a frame that makes no sense breaks
    the link. The side that ``answers`` accepts, when all is as it should be.
    """

    def __init__(self, request: OpenMemory, *, answers: bool) -> None:
        self.exposed: Reply[Exposed] = Reply()
        """What the peer exports, if this side is to import it."""
        self.proof: Reply[bytes] = Reply()
        """What the peer has read in memory of this side."""
        self.accepted: Reply[None] = Reply()
        of = request.of
        self._answers = answers
        self._is_on_gpu = bool(request.gpu_uuid)
        self._exports = of == "pipe" or (of == "lookup") is answers
        self._imports = of == "pipe" or (of == "inserts") is answers
        self._stream: LinkStream | None = None
        self._is_over = False

    @classmethod
    def ask(cls, link: Link, request: OpenMemory) -> Self:
        """Begin one on ``link``.

        :raises PeerLost: the link is over
        """
        handshake = cls(request, answers=False)
        handshake._stream = link.open_stream(handshake, request)
        return handshake

    @classmethod
    def answer(cls, stream: LinkStream, request: OpenMemory) -> Self:
        """Return the other side of one that the peer has begun."""
        handshake = cls(request, answers=True)
        handshake._stream = stream
        return handshake

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.refuse(error)
            # These keep the error, which keeps frames, and what is in them.
            self.exposed, self.proof, self.accepted = Reply(), Reply(), Reply()

    async def export(self, importer: Importer) -> None:
        """Expose memory, and wait until the peer has proved that it reads it.

        Who has asked for that alone waits until it is accepted, too. However else the
        call ends, the peer may not open it.

        :raises ConfigError: it has read something else
        :raises PeerLost: the link ended first
        :raises AsyncKVError: the peer has refused, or has given it up
        """
        try:
            self._send(importer.exposed)
            if not importer.verify(await self.proof):
                raise ConfigError("that is not what the memory holds")
            self.check()
            if not (self._imports or self._answers):
                await self.accepted
        except BaseException:
            importer.link_over()
            raise

    def prove(self, nonce: bytes) -> None:
        """Say what was read in the peer's memory. Never waits."""
        self._send(Proved(nonce))

    def check(self) -> None:
        """Raise why nothing comes of it, if the peer has given it up meanwhile."""
        self.accepted.check()

    def accept(self) -> None:
        """All is as it should be. Never waits."""
        self._end(Accepted())

    def refuse(self, error: BaseException) -> None:
        """Say that nothing comes of it, and hear no more. Never waits."""
        if not self._answers:
            self._end(Cancel())
        elif isinstance(error, Exception):
            self._end(to_failure(error))
        else:
            self._end(Cancelled())

    async def wait_accepted(self, link: Link) -> None:
        """Wait until the peer has accepted what was found in its memory; at most 10 s.

        What it would offer meanwhile nobody could know: a peer that does not say has
        lost the link.

        :raises PeerLost: it did not say, or the link was lost
        :raises AsyncKVError: it has refused
        """
        try:
            async with asyncio.timeout(_ACCEPT_S):
                await self.accepted
        except TimeoutError:
            link.abort()
            raise PeerLost(
                f"{link.peer.id} did not say for {_ACCEPT_S:g} s that its memory is "
                "shared",
                hint="is that process stopped, or very busy?",
            ) from None

    def on_frame(self, frame: Frame, body: bytes) -> None:
        if body:
            raise RemoteProtocolError(f"{type(frame).__name__} with a body")
        if self._is_over:
            return
        imports = self._imports and _is_due(self.exposed)
        exports = self._exports and _is_due(self.proof)
        if imports and isinstance(frame, Exposed) and self._is_asked_for(frame):
            self.exposed.give(frame)
        elif exports and isinstance(frame, Proved):
            self.proof.give(frame.nonce)
        elif isinstance(frame, Accepted) and not self._answers:
            self._is_over = True
            self.accepted.give(None)
        elif isinstance(frame, Cancel) and self._answers:
            self._end(Cancelled())
            self._fail(AsyncKVError("the peer has given it up"))
        else:
            fail_by(frame, "sharing of memory", self._fail)

    def on_lost(self, error: PeerLost) -> None:
        self._fail(error)

    def _is_asked_for(self, exposed: Exposed) -> bool:
        return bool(exposed.handle) is self._is_on_gpu

    def _fail(self, error: Exception) -> None:
        self._is_over = True
        for answer in (self.exposed, self.proof, self.accepted):
            answer.fail(error)

    def _end(self, last: Frame) -> None:
        self._send(last)
        self._is_over = True

    def _send(self, frame: Frame) -> None:
        if self._stream is not None and not self._is_over:
            self._stream.send(frame)


def _is_due(answer: Reply[Any]) -> bool:
    return not answer.is_in or answer.is_given_up
