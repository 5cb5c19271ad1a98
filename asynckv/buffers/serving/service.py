"""What answers the requests of one link: it owns their tasks, and ends with them."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from asynckv.buffers.serving.limits import KeptBytes
from asynckv.errors import PeerLost
from asynckv.links.link import Link, LinkStream
from asynckv.links.requests import StreamHandler
from asynckv.protocol.frames import Frame, OpeningFrame
from asynckv.waits.own_tasks import OwnTasks

__all__ = ("Service", "answer_at_once")


class _Answered:
    """The handler of a request that was answered at once."""

    def on_frame(self, frame: Frame, body: bytes) -> None:
        """A Cancel may have crossed the answer."""

    def on_lost(self, error: PeerLost) -> None:
        """Nothing is left to do."""


def answer_at_once(stream: LinkStream, last: Frame) -> StreamHandler:
    """Answer a request that leaves nothing to do; return who hears of it."""
    stream.send(last)
    stream.close()
    return _Answered()


class Service(abc.ABC):
    """Answers some of the requests that one link makes, and owns their tasks."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.loop = asyncio.get_running_loop()
        self.is_leaving = False
        self.tasks = OwnTasks()

    @abc.abstractmethod
    def open(
        self, stream: LinkStream, frame: OpeningFrame, body: bytes
    ) -> StreamHandler | None:
        """Answer a request; ``None`` if it is none that is answered here."""

    @abc.abstractmethod
    async def wait_idle(self) -> None:
        """Wait until nothing is under way. Cancelling leaves no trace."""

    @property
    def has_ended(self) -> bool:
        """No task of this peer is left."""
        return not len(self.tasks)

    def call_when_ended(self, callback: Callable[[], None]) -> None:
        """Call back each time that the last task of this peer has ended."""
        self.tasks.all_ended = callback

    def run(
        self, coroutine: Coroutine[Any, Any, None], name: str
    ) -> asyncio.Task[None]:
        """Own a task of one request."""
        return self.tasks.own(coroutine, f"asynckv: {name}")

    def run_kept(
        self,
        kept: KeptBytes,
        nbytes: int,
        run: Callable[[], Coroutine[Any, Any, None]],
        name: str,
    ) -> asyncio.Task[None]:
        """Own the task of one request, which keeps so many bytes until it ends.

        :raises Overloaded: they cannot be kept; nothing was begun
        """
        kept.take(nbytes)
        task = self.run(run(), name)
        task.add_done_callback(lambda _: kept.give(nbytes))
        return task

    def leave(self) -> None:
        """Begin nothing new. What is under way goes on."""
        self.is_leaving = True

    def abort(self) -> None:
        """End what is under way. Never waits."""
        self.tasks.cancel()

    async def wait_ended(self) -> None:
        """Wait for the tasks of an aborted service."""
        await self.tasks.wait()
