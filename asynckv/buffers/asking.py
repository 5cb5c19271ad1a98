"""A question to a peer that has one answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from asynckv.errors import PeerLost
from asynckv.links.answers import Answer, fail_by
from asynckv.links.link import Link
from asynckv.protocol.frames import Cancel, Frame, OpeningFrame, Result

if TYPE_CHECKING:
    from asynckv.buffers.remote import Peer

__all__ = ("ANSWER_S", "ask")

ANSWER_S: Final = 30.0
"""A live peer answers a question that needs no waiting within this time."""


class _Question:
    """One question on one link."""

    def __init__(self, link: Link, frame: OpeningFrame, body: bytes) -> None:
        self.answer: Answer[Result] = Answer()
        self._stream = link.open_stream(self, frame, body)

    def on_frame(self, frame: Frame, body: bytes) -> None:
        if isinstance(frame, Result):
            self.answer.give(frame)
        else:
            fail_by(frame, "question", self.answer.fail)

    def on_lost(self, error: PeerLost) -> None:
        self.answer.fail(error)

    def cancel(self) -> None:
        """The answer is not wanted any more. Never waits."""
        self._stream.send(Cancel())


async def ask(
    peer: Peer,
    frame: OpeningFrame,
    body: bytes = b"",
    *,
    deadline_s: float | None = ANSWER_S,
    incarnation: str = "",
) -> Result:
    """Ask, again after a reconnect, and return the answer.

    Bounded from the call on, however often the link is cut: by ``deadline_s``
    and the ``reconnect_s`` of the peer; not at all with ``None``, which is for
    what may wait. A cancelled call leaves no trace.

    :raises TimeoutError: a live peer did not answer in ``deadline_s``, or no
        link lived for long enough
    :raises PeerLost: the peer is gone and did not come back in time
    :raises PeerRestarted: it has lost what ``incarnation`` knew
    """
    in_all_s = None if deadline_s is None else deadline_s + peer.reconnect_s
    async with asyncio.timeout(in_all_s):
        while True:
            link = await peer.link(incarnation)
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
