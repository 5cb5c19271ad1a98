"""How a link ends: once, with one reason, and everybody is told of it.

A peer that is silent is noticed by a heartbeat: kernels acknowledge for frozen
processes too. That says that the control connection lives; payload that stands still
is noticed by :class:`~asynckv.links.link.Progress`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Final

from asynckv.abc import PayloadTransport
from asynckv.affinity import ProcessBound
from asynckv.errors import PeerLost, ProtocolError
from asynckv.links.streams import ControlStream, LinkWriter, StreamHandler
from asynckv.observability.lines import as_line
from asynckv.protocol.session import Session

__all__ = (
    "GRACE_S",
    "MISSED_BEATS",
    "Heartbeat",
    "LinkEnd",
    "copy_of",
)

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

_TOLD_AT_ONCE: Final = 64

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
        self._told: asyncio.Future[None] = self._loop.create_future()

    def call(self, fn: Callable[[PeerLost], None]) -> None:
        """Call ``fn`` once when the link ends, on a later tick; now if it has."""
        if self.error is not None:
            self._loop.call_soon(fn, copy_of(self.error))
        else:
            self._when_lost.append(fn)

    async def wait(self) -> None:
        """Wait until the control connection is closed, and everybody was told."""
        await asyncio.wait({self._closed, self._told})

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
        if self._loop.is_closed():
            self._tell_lost(error)  # no other tick comes
            return
        self._loop.call_soon(self._tell_lost, error)
        self._outgoing.notify_drained()

    def _tell_lost(
        self, error: PeerLost, left: Iterator[StreamHandler] | None = None
    ) -> None:
        lost = self._session.take_lost() if left is None else left
        for number, handler in enumerate(lost, 1):
            self._notify(handler.on_lost, error)
            if number == _TOLD_AT_ONCE and not self._loop.is_closed():
                self._loop.call_soon(self._tell_lost, error, lost)
                return
        for fn in self._when_lost:
            self._notify(fn, error)
        self._when_lost.clear()
        if not self._loop.is_closed():
            self._told.set_result(None)

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
