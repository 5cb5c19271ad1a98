"""What answers the requests of one link: it owns their tasks, and ends with them.

How long they take, from frame to answer, is counted for all links of a server.
"""

from __future__ import annotations

import abc
import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

from asynckv.errors import EntryAborted, NotServed, Overloaded, PeerLost
from asynckv.links.link import Link, LinkStream, RequestTiming, TimedStream
from asynckv.links.streams import StreamHandler
from asynckv.observability.latencies import Latencies
from asynckv.protocol.frames import (
    Accepted,
    Clear,
    Contains,
    Delete,
    Frame,
    Get,
    Insert,
    JoinGroup,
    OpeningFrame,
    OpenPipe,
    Pin,
    Put,
    Result,
    Stat,
)
from asynckv.waits.waiting import OwnTasks

__all__ = (
    "BUSY_BYTES",
    "REQUEST_NBYTES",
    "SILENCE_S",
    "KeptBytes",
    "LinkBytes",
    "LinkServices",
    "RequestTimes",
    "Service",
    "Silence",
    "WaitingBytes",
    "answer_at_once",
)


BUSY_BYTES: Final = 4 * 2**20
"""With so much unwritten for a peer, its next small delivery waits its turn."""

REQUEST_NBYTES: Final = 2048
"""What a request costs beside what it says: as much as is tested for one."""

_SHARE: Final = 2
"""One link has at most this part of what all have: a half."""


class WaitingBytes:
    """Of all links of a server: so much for queries, and as much for inserts."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._queries = _Whole(max_bytes)
        self._inserts = _Whole(max_bytes)

    @property
    def used_bytes(self) -> int:
        """What requests keep now."""
        return self._queries.used_bytes + self._inserts.used_bytes

    @property
    def refused(self) -> int:
        """How many requests were one too many."""
        return self._queries.refused + self._inserts.refused

    def for_link(self) -> LinkBytes:
        """Return what the requests of one more link are charged to."""
        return LinkBytes(KeptBytes(self._queries), KeptBytes(self._inserts))


class _Whole:
    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.refused = 0


class LinkBytes:
    """Of one link."""

    def __init__(self, queries: KeptBytes, inserts: KeptBytes) -> None:
        self.queries = queries
        self.inserts = inserts


class KeptBytes:
    """What requests of one kind and link keep."""

    def __init__(self, whole: _Whole) -> None:
        self._whole = whole
        self._used_bytes = 0

    def fits(self, nbytes: int) -> bool:
        """May so many bytes more be kept?"""
        whole = self._whole
        return (
            self._used_bytes + nbytes <= whole.max_bytes // _SHARE
            and whole.used_bytes + nbytes <= whole.max_bytes
        )

    def take(self, nbytes: int) -> None:
        """Charge for a request; each is given back once.

        :raises Overloaded: it cannot be kept; nothing was charged
        """
        whole = self._whole
        used_bytes, in_all = self._used_bytes + nbytes, whole.used_bytes + nbytes
        if used_bytes > whole.max_bytes // _SHARE or in_all > whole.max_bytes:
            whole.refused += 1
            raise Overloaded(
                f"the requests of this link keep {self._used_bytes} bytes at the "
                f"server and those of all links {whole.used_bytes}; with {nbytes} "
                f"more it would be over {whole.max_bytes // _SHARE} or "
                f"{whole.max_bytes}"
            )
        self._used_bytes, whole.used_bytes = used_bytes, in_all

    def give(self, nbytes: int) -> None:
        """The request is over."""
        self._used_bytes -= nbytes
        self._whole.used_bytes -= nbytes


SILENCE_S: Final = 30.0
"""A writer that puts nothing for as long, on a live link, has failed."""


class Silence:
    """Listens from now on, until :meth:`stop`; ``failed`` is told, once, of silence.

    ``landed`` returns how many bytes have come of each transfer that is under way: a
    tensor that comes slowly is no silence. Nor does it count while ``is_working`` says
    that this side has work to do on what came. Nothing here waits.
    """

    def __init__(
        self,
        landed: Callable[[], Mapping[int, int]],
        failed: Callable[[Exception], None],
        *,
        is_working: Callable[[], bool],
    ) -> None:
        self._landed = landed
        self._is_working = is_working
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._landed_bytes: Mapping[int, int] = {}
        self._is_over = False
        self._timer = self._listen()

    def note_progress(self) -> None:
        """The writer is alive."""
        self._timer.cancel()
        if not self._is_over:
            self._timer = self._listen()

    def stop(self) -> None:
        """Listen no more."""
        self._is_over = True
        self._timer.cancel()

    def _listen(self) -> asyncio.TimerHandle:
        return self._loop.call_later(SILENCE_S, self._fall_silent)

    def _fall_silent(self) -> None:
        landed = self._landed()
        has_grown = landed != self._landed_bytes and any(landed.values())
        if has_grown or self._is_working():
            self._landed_bytes = landed
            self.note_progress()
            return
        message = f"no tensor came for {SILENCE_S:.0f} s"
        self._failed(EntryAborted(message, reason="producer"))


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
        self.is_draining = False
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
        task = self.tasks.own(run(), f"asynckv: {name}")
        task.add_done_callback(lambda _: kept.give(nbytes))
        return task

    def drain(self) -> None:
        """Begin nothing new. What is under way goes on."""
        self.is_draining = True

    def abort(self) -> None:
        """End what is under way. Never waits."""
        self.tasks.cancel()

    async def wait_ended(self) -> None:
        """Wait for the tasks of an aborted service."""
        await self.tasks.wait()


_TIMED: Final[Mapping[type, tuple[str, type]]] = {
    Contains: ("contains", Result),
    Get: ("get", Result),
    Insert: ("insert", Accepted),
    Put: ("put", Accepted),
}
"""The requests that are timed, and the frame that ends the time."""


class RequestTimes:
    """Histograms by what is asked for: ``"get"``, ``"insert"`` and so on.

    A get lasts until its value is verified at the peer, a put until the value is
    stored, an insert until the entry is in. What was cancelled, failed or was cut off
    is not counted, nor is what waits for a match: that takes as long as nobody inserts.
    """

    def __init__(self) -> None:
        self._timings = {
            opening: RequestTiming(ended_by)
            for opening, (_, ended_by) in _TIMED.items()
        }

    def begin(self, stream: LinkStream, frame: OpeningFrame) -> LinkStream:
        """The time of the request begins now, if it is one that is timed.

        Returns the stream that it is to be answered by.
        """
        timing = self._timings.get(type(frame))
        if timing is None:
            return stream
        began_s = time.perf_counter()
        return TimedStream(
            *(stream.link, stream._session, stream._outgoing, stream.id),
            timing=timing,
            began_s=began_s,
        )

    def latencies(self) -> dict[str, Latencies]:
        """Return what was counted so far."""
        return {_TIMED[one][0]: t.latencies() for one, t in self._timings.items()}


class LinkServices:
    """What one link may ask of a server that serves ``what``: of ``all``, in turn."""

    def __init__(
        self, link: Link, what: str, times: RequestTimes, every: Sequence[Service]
    ) -> None:
        self.link = link
        self.all = every
        self.is_lost = False
        self._what = what
        self._times = times

    @property
    def has_ended(self) -> bool:
        """The link is lost and nothing of it is left."""
        return self.is_lost and all(service.has_ended for service in self.all)

    def open(
        self, stream: LinkStream, frame: OpeningFrame, body: bytes
    ) -> StreamHandler:
        """Have a request answered by whoever knows it.

        :raises NotServed: nobody does
        """
        stream = self._times.begin(stream, frame)
        for service in self.all:
            handler = service.open(stream, frame, body)
            if handler is not None:
                return handler
        raise _not_served(frame, self._what)


def _not_served(frame: OpeningFrame, served: str) -> NotServed:
    """Return what a peer is told that asks for what is not served here."""
    if isinstance(frame, OpenPipe | JoinGroup):
        return NotServed(f"this peer serves {served}, no pipe: use connect()")
    missing, option = "lookup buffer", "lookup"
    if isinstance(frame, Put | Get | Delete | Clear | Contains | Pin | Stat):
        missing = option = "store"
    # No hint: those of a peer's errors are not sent.
    return NotServed(
        f"this peer serves {served}, no {missing}: start it with {option}=..."
    )
