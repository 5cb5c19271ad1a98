"""A question to a peer that has one answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from asynckv.errors import (
    AsyncKVError,
    PeerLost,
    PeerRestarted,
    RemoteProtocolError,
)
from asynckv.links.link import Link
from asynckv.protocol.failures import from_failure
from asynckv.protocol.frames import (
    Cancel,
    Cancelled,
    Failure,
    Frame,
    OpeningFrame,
    Result,
)

if TYPE_CHECKING:
    from asynckv.buffers.remote import Peer

__all__ = ("ANSWER_S", "ask")

ANSWER_S: Final = 30.0
"""A live peer answers a question that needs no waiting within this time."""


class _Question:
    """One question on one link."""

    def __init__(self, link: Link, frame: OpeningFrame, body: bytes) -> None:
        self.answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._stream = link.open_stream(self, frame, body)

    def on_frame(self, frame: Frame, body: bytes) -> None:
        if self.answer.done():
            return
        match frame:
            case Result():
                self.answer.set_result(frame)
            case Failure():
                self._fail(from_failure(frame))
            case Cancelled():
                self._fail(AsyncKVError("the peer gave the question up"))
            case _:
                error = RemoteProtocolError(f"no {type(frame).__name__} belongs here")
                self._fail(error)  # of a last frame's stream nobody else is told
                raise error

    def on_lost(self, error: PeerLost) -> None:
        self._fail(error)

    def cancel(self) -> None:
        """The answer is not wanted any more. Never waits."""
        if not self.answer.done() or self.answer.cancelled():
            self._stream.send(Cancel())

    def _fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # who asked may have been cancelled meanwhile


async def ask(
    peer: Peer,
    frame: OpeningFrame,
    body: bytes = b"",
    *,
    deadline_s: float | None = ANSWER_S,
) -> Result:
    """Ask, again after a reconnect, and return the answer.

    A cancelled call leaves no trace.

    :raises TimeoutError: a live peer did not answer in ``deadline_s``
    :raises PeerLost: the peer is gone and did not come back in time
    """
    incarnation = ""
    while True:
        link = await peer.link()
        if incarnation and deadline_s is None and incarnation != link.peer.incarnation:
            raise PeerRestarted(f"{peer.url} came back without its memory")
        incarnation = link.peer.incarnation
        question = _Question(link, frame, body)
        try:
            async with asyncio.timeout(deadline_s):
                return await question.answer
        except PeerLost:
            if link.is_open:
                raise  # the peer says so, of something else
        except BaseException:
            question.cancel()
            raise
