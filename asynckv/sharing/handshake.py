"""The stream on which one side opens memory of the other: exposed, proved, accepted.

An example: a peer asks by ``OpenMap`` for memory of the host, hears in a ``Mappable``
where it is, maps it, says in a ``Mapped`` what it has read there, and hears
``Accepted``. What differs from one kind of memory to another is a row of a table.
"""

from __future__ import annotations

import asyncio
import dataclasses
from types import TracebackType
from typing import Final, Generic, Literal, Self, TypeVar

from asynckv.errors import AsyncKVError, ConfigError, PeerLost, RemoteProtocolError
from asynckv.links.link import Link, LinkStream
from asynckv.links.requests import fail_by
from asynckv.protocol.failures import to_failure
from asynckv.protocol.frames import (
    Accepted,
    Cancel,
    Cancelled,
    Frame,
    OpeningFrame,
)
from asynckv.protocol.transfer_frames import Exported, Imported, Mappable, Mapped
from asynckv.sharing.exporter import Exposed, Importer
from asynckv.waits.replies import Reply

__all__ = (
    "GPU",
    "GPU_OF_ASKER",
    "GPU_OF_BOTH",
    "HOST",
    "HOST_OF_BOTH",
    "Handshake",
    "Kind",
)

_ACCEPT_S: Final = 10.0

E = TypeVar("E", bound=Exposed)


@dataclasses.dataclass(frozen=True)
class Kind(Generic[E]):
    """One kind of memory, and which side of the stream exports it."""

    exposed: type[E]
    proof: type[Mapped] | type[Imported]
    exporter: Literal["asks", "answers", "both"] = "answers"


HOST: Final = Kind(Mappable, Mapped)
HOST_OF_BOTH: Final = Kind(Mappable, Mapped, "both")
GPU: Final = Kind(Exported, Imported)
GPU_OF_ASKER: Final = Kind(Exported, Imported, "asks")
GPU_OF_BOTH: Final = Kind(Exported, Imported, "both")


class Handshake(Generic[E]):
    """One side of it, as a context: whoever leaves it by an error says so.

    What the peer says is kept until it is awaited; a frame that makes no sense breaks
    the link. The side that ``answers`` accepts, when all is as it should be.
    """

    def __init__(self, kind: Kind[E], *, answers: bool) -> None:
        self.exposed: Reply[E] = Reply()
        """What the peer exports, if this side is to import it."""
        self.proof: Reply[bytes] = Reply()
        """What the peer has read in memory of this side."""
        self.accepted: Reply[None] = Reply()
        self._kind = kind
        self._answers = answers
        self._exports = kind.exporter in ("both", "answers" if answers else "asks")
        self._imports = kind.exporter in ("both", "asks" if answers else "answers")
        self._stream: LinkStream | None = None
        self._is_over = False

    @classmethod
    def ask(cls, kind: Kind[E], link: Link, frame: OpeningFrame) -> Self:
        """Begin one on ``link``.

        :raises PeerLost: the link is over
        """
        handshake = cls(kind, answers=False)
        handshake._stream = link.open_stream(handshake, frame)
        return handshake

    @classmethod
    def answer(cls, kind: Kind[E], stream: LinkStream) -> Self:
        """Return the other side of one that the peer has begun."""
        handshake = cls(kind, answers=True)
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
            self.leave(error)
            # These keep the error, which keeps frames, and what is in them.
            self.exposed, self.proof, self.accepted = Reply(), Reply(), Reply()

    async def export(self, importer: Importer, exposed: Exposed) -> None:
        """Expose memory, and wait until the peer has proved that it reads it.

        Who has asked for that alone waits until it is accepted, too. However else the
        call ends, the peer may not open it.

        :raises ConfigError: it has read something else
        :raises PeerLost: the link ended first
        :raises AsyncKVError: the peer has refused, or has given it up
        """
        try:
            self._send(exposed)
            if not importer.verify(await self.proof):
                raise ConfigError("that is not what the memory holds")
            self.check()
            if self._kind.exporter == "asks":
                await self.accepted
        except BaseException:
            importer.link_over()
            raise

    def prove(self, nonce: bytes) -> None:
        """Say what was read in the peer's memory. Never waits."""
        self._send(self._kind.proof(nonce))

    def check(self) -> None:
        """Raise why nothing comes of it, if the peer has given it up meanwhile."""
        self.accepted.check()

    def accept(self) -> None:
        """All is as it should be. Never waits."""
        self._end(Accepted())

    def leave(self, error: BaseException) -> None:
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
        if imports and isinstance(frame, self._kind.exposed):
            self.exposed.give(frame)
        elif exports and isinstance(frame, self._kind.proof):
            self.proof.give(frame.found)
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


def _is_due(answer: Reply[E] | Reply[bytes]) -> bool:
    return not answer.is_in or answer.is_given_up
