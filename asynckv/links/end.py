"""How a link ends: once, with one reason, and everybody is told of it.

A peer that is silent is noticed by a heartbeat: kernels acknowledge for frozen
processes too. That says that the control connection lives; lanes may be cut all the
same, or the peer may never send what it was granted: payload that stands still is
noticed too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from asynckv.abc import PayloadTransport
from asynckv.errors import PeerLost, ProtocolError, RemoteProtocolError
from asynckv.links.streams import ControlStream, LinkWriter, StreamHandler
from asynckv.observability.lines import as_line
from asynckv.processes import ProcessBound
from asynckv.protocol.session import Session

__all__ = (
    "GRACE_S",
    "MISSED_BEATS",
    "OWN_WORK_S",
    "STALL_S",
    "Heartbeat",
    "LinkEnd",
    "Progress",
    "copy_of",
)

STALL_S: Final = 30.0
_LOOKS: Final = 6
"""So often within that time is looked: one stall is told at most a sixth later."""

OWN_WORK_S: Final = 300.0
"""So long a copy on this side keeps its transfer from standing still: then it hangs."""

_LATE_S: Final = 1.0
_EARLY_S: Final = 0.001
"""The time of the last look may be a little short of the whole."""

_NO_TRANSFER: Final = -1


class Progress:
    """The transfers of one link whose bytes are expected now.

    ``stalled(error)`` is called once when for 30 s no byte of any of them has
    landed, 5 s later at most. A loop that was stalled itself does not judge for
    that time, nor is a transfer judged while this side is :meth:`working` at it:
    one of which a part is worked on here, and another never sent, is told of 335 s
    after that work began at most.
    """

    def __init__(
        self, payload: PayloadTransport, stalled: Callable[[RemoteProtocolError], None]
    ) -> None:
        self._payload = payload
        self._stalled = stalled
        self._loop = asyncio.get_running_loop()
        self._transfers = Counter[int]()
        self._seen: dict[int, int] = {}
        self._noted_bytes = 0
        self._working: dict[object, tuple[int, float]] = {}
        self._grew_s = 0.0
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def expect(self, transfer: int) -> None:
        """All bytes of ``transfer`` are on their way, or should be.

        Or those that come by one of two ways: each is to be forgotten then.
        """
        self._transfers[transfer] += 1
        if self._timer is None:
            self._note_growth()
            self._recheck_later()

    def forget(self, transfer: int) -> None:
        """It has landed, or nobody wants it any more."""
        self._transfers[transfer] -= 1
        if self._transfers[transfer] <= 0:
            del self._transfers[transfer]

    def note(self, nbytes: int) -> None:
        """So many bytes came by another way than the payload transport."""
        self._noted_bytes += nbytes

    @contextlib.contextmanager
    def working(self, transfer: int) -> Iterator[None]:
        """Meanwhile bytes of ``transfer`` are copied, or digested, on this side.

        Its peer is not to blame for how long that takes, up to 300 s.
        """
        key = object()
        self._working[key] = transfer, self._loop.time()
        try:
            yield
        finally:
            del self._working[key]

    def is_working(self, transfer: int) -> bool:
        """Are bytes of ``transfer`` worked on here, for less than 300 s so far?"""
        return transfer in self._own(self._loop.time())

    def stop(self) -> None:
        """Watch no more."""
        self._transfers.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _note_growth(self) -> None:
        self._seen, self._grew_s = self._landed(), self._loop.time()

    def _recheck_later(self) -> None:
        pause_s = STALL_S / _LOOKS
        self._due_s = self._loop.time() + pause_s
        self._timer = self._loop.call_later(pause_s, self._recheck)

    def _recheck(self) -> None:
        self._timer = None
        if not self._transfers:
            return
        now_s = self._loop.time()
        # One that came or went, or grew, is progress of them all.
        is_late = now_s > self._due_s + _LATE_S
        if is_late or self._landed() != self._seen or not self._is_owed(now_s):
            self._note_growth()
        elif now_s - self._grew_s > STALL_S - _EARLY_S:
            self._notify()
            return
        self._recheck_later()

    def _is_owed(self, now_s: float) -> bool:
        """Is there a transfer that this side is not at work at?"""
        return not self._own(now_s).issuperset(self._transfers)

    def _own(self, now_s: float) -> set[int]:
        return {x for x, at_s in self._working.values() if now_s - at_s < OWN_WORK_S}

    def _notify(self) -> None:
        self.stop()
        self._stalled(
            RemoteProtocolError(
                f"payload that was to come has stood still for {STALL_S:g} s",
                hint="is something between the peers that drops bulk data?",
            )
        )

    def _landed(self) -> dict[int, int]:
        landed = {x: self._payload.landed_bytes(x) for x in self._transfers}
        return landed | {_NO_TRANSFER: self._noted_bytes}


MISSED_BEATS: Final = 3
"""As many silent intervals in a row, and the peer is dead."""


class Heartbeat:
    """Calls ``beat`` every interval, and ``dead`` after three silent ones.

    Set ``has_received`` whenever anything comes from the peer. An interval in
    which this loop itself was late is not counted: what the peer sent may
    still be unread.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        interval_s: float,
        *,
        beat: Callable[[], None],
        dead: Callable[[], None],
    ) -> None:
        self.has_received = True
        self._loop = loop
        self._interval_s = interval_s
        self._beat = beat
        self._dead = dead
        self._missed = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin; the first beat comes after one interval."""
        self._timer = self._loop.call_later(
            self._interval_s, self._tick, self._loop.time() + self._interval_s
        )

    def stop(self) -> None:
        """End. Neither function is called any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self, due: float) -> None:
        stalled = self._loop.time() - due > self._interval_s / 2
        if self.has_received:
            self._missed = 0
        elif not stalled:
            self._missed += 1
        self.has_received = False
        if self._missed >= MISSED_BEATS:
            self.stop()
            self._dead()
            return
        self.start()
        self._beat()


logger = logging.getLogger(__name__)

GRACE_S: Final = 1.0
"""How long a peer may take for the last words of a link, and to hang up."""


class LinkEnd(ProcessBound):
    """The end of one link. ``error`` says how it came, once it has."""

    def __init__(
        self,
        peer_id: str,
        stream: ControlStream,
        session: Session[StreamHandler],
        outgoing: LinkWriter,
        payload: PayloadTransport,
        heartbeat: Heartbeat,
    ) -> None:
        self._own()
        self.error: PeerLost | None = None
        self._peer_id = peer_id
        self._stream = stream
        self._session = session
        self._outgoing = outgoing
        self._payload = payload
        self._heartbeat = heartbeat
        self._loop = asyncio.get_running_loop()
        self._when_lost: list[Callable[[PeerLost], None]] = []
        self._grace: asyncio.TimerHandle | None = None
        self._closed: asyncio.Future[None] = self._loop.create_future()

    def call(self, fn: Callable[[PeerLost], None]) -> None:
        """Call ``fn`` once when the link ends, on a later tick; now if it has."""
        if self.error is not None:
            self._loop.call_soon(fn, copy_of(self.error))
        else:
            self._when_lost.append(fn)

    async def wait(self) -> None:
        """Wait until the control connection is closed."""
        await asyncio.wait({self._closed})

    def at_once(self, error: Exception) -> None:
        """Close now, without a word."""
        self._lose(error)
        self._close()

    def say_goodbye(self) -> None:
        """Say goodbye behind all that is queued, and hang up."""
        if self.error is not None:
            return
        self._session.say_goodbye()
        error = PeerLost(f"the link to {self._peer_id} was closed on this side")
        error.goodbye = True
        self._lose(error)
        self._hang_up()

    def on_goodbye(self, reason: str) -> None:
        """The peer has said goodbye: what is queued for it is for nobody."""
        why = reason and f": {as_line(reason)}"
        error = PeerLost(f"{self._peer_id} said goodbye{why}")
        error.goodbye = True
        self._lose(error)
        self._payload.abort()
        self._session.outbox.clear()
        self._hang_up()

    def refuse(self, error: ProtocolError) -> None:
        """The peer broke the rules: end for ever, after one last word to it."""
        # As a text: a record that is kept would keep what the error has seen.
        logger.warning("the link to %s broke: %s", self._peer_id, str(error))
        self._session.refuse(error)
        self._lose(error)
        self._payload.abort()
        self._hang_up()

    def _lose(self, error: Exception) -> None:
        if self.error is not None:
            return
        if not isinstance(error, PeerLost):
            lost = PeerLost(f"the link to {self._peer_id} broke: {error}")
            lost.__cause__ = error
            error = lost
        self.error = error
        self._heartbeat.stop()
        logger.debug("the link to %s ended: %s", self._peer_id, error)
        self._session.end_streams()
        self._loop.call_soon(self._tell_lost, error)
        self._outgoing.notify_drained()

    def _tell_lost(self, error: PeerLost) -> None:
        for handler in self._session.take_lost():
            self._notify(handler.on_lost, error)
        for fn in self._when_lost:
            self._notify(fn, error)
        self._when_lost.clear()

    def _notify(self, fn: Callable[[PeerLost], None], error: PeerLost) -> None:
        try:
            fn(copy_of(error))
        except Exception:
            # The others are told too, whatever one of them does.
            logger.exception("told of the loss of %s", self._peer_id)

    def _hang_up(self) -> None:
        self._outgoing.finish()
        if self._grace is None and not self._closed.done():
            self._grace = self._loop.call_later(GRACE_S, self._close)

    def _close(self) -> None:
        if self._closed.done():
            return
        self._closed.set_result(None)
        if self._grace is not None:
            self._grace.cancel()
        self._heartbeat.stop()
        self._outgoing.stop()
        if not self._is_copy:
            self._stream.abort()
            self._payload.abort()


def copy_of(error: PeerLost) -> PeerLost:
    """Return an error to raise: tracebacks and contexts of one would mix."""
    copy = PeerLost(error.message, hint=error.hint)
    copy.goodbye = error.goodbye
    copy.__cause__ = error.__cause__
    return copy
