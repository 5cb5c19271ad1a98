"""One connection to one peer, shared by any number of requests.

Everything but closing is a plain function: what is sent is queued whole and
written once a tick; what comes is handed on from the socket's own callback.
So nothing that is cancelled ever tears a frame, and no reader waits for an
application.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Final

import anyio

from asynckv.errors import (
    AsyncKVError,
    PeerLost,
    ProtocolError,
    RemoteProtocolError,
    WrongRole,
)
from asynckv.links.heartbeat import Heartbeat
from asynckv.links.outgoing import Outgoing
from asynckv.links.payloads import make_payload
from asynckv.links.requests import LinkStream, Service, StreamHandler
from asynckv.links.streams import ControlStream
from asynckv.protocol.codec import Buffer
from asynckv.protocol.events import Came, Event, Farewell, Opened, Refused
from asynckv.protocol.failures import to_failure
from asynckv.protocol.frames import OpeningFrame
from asynckv.protocol.handshake import Agreement
from asynckv.protocol.session import Session

__all__ = ("Link",)

logger = logging.getLogger(__name__)

_GRACE_S: Final = 1.0


class Link:
    """A connection that is up. Made by :func:`dial` and by a listener.

    ``limits`` is what both sides keep to, ``peer_limits`` what the peer said
    of itself. ``error`` says how the link ended, once it has.
    """

    def __init__(
        self,
        stream: ControlStream,
        agreement: Agreement,
        *,
        dialled: bool,
        url: str = "",
    ) -> None:
        self.peer = agreement.peer
        self.fingerprint = agreement.fingerprint
        self.limits = agreement.limits
        self.peer_limits = agreement.peer_limits
        self.transport_name = agreement.payload_path
        self.digest = agreement.digest
        self.url = url
        self.error: PeerLost | None = None
        self._loop = asyncio.get_running_loop()
        self.payload = make_payload(agreement, self._loop, self.abort)
        self._stream = stream
        self._session: Session[StreamHandler]
        self._session = Session(agreement.limits, dialled=dialled)
        self._service: Service | None = None
        # Both directions share one payload transport: their numbers differ.
        self._last_transfer = -1 if dialled else 0
        self._pings = itertools.count(1)
        self._outgoing = Outgoing(
            stream, self._session.outbox, self._loop, self._read_on
        )
        # What was received; not empty only while reading is paused.
        self._events: Iterator[Event[StreamHandler]] = iter(())
        self._when_lost: list[Callable[[PeerLost], None]] = []
        self._grace: asyncio.TimerHandle | None = None
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._heartbeat = Heartbeat(
            self._loop,
            agreement.limits.heartbeat_ms / 1000,
            beat=self._on_beat,
            dead=self._on_silence,
        )

    def __repr__(self) -> str:
        state = "open" if self.is_open else "lost"
        return f"<Link to {self.peer.id} by {self.transport_name}, {state}>"

    @property
    def is_open(self) -> bool:
        """Whether requests can still be made."""
        return self.error is None

    @property
    def outgoing_bytes(self) -> int:
        """Bytes of frames that have not left for the kernel yet."""
        return self._outgoing.nbytes

    def start(self, service: Service | None) -> None:
        """Begin to read. Called once, by whoever made the link."""
        self._service = service
        if self.error is None:
            self._stream.start(self)
            self._heartbeat.start()

    def open_stream(
        self, handler: StreamHandler, frame: OpeningFrame, body: Buffer = b""
    ) -> LinkStream:
        """Make a request; ``handler`` hears what follows. Never waits.

        :raises PeerLost: the link is over
        :raises LocalProtocolError: the frame is too long, or too many are open
        """
        if self.error is not None:
            raise _copy(self.error)
        stream_id = self._session.open(handler, frame, body)
        self._outgoing.flush_soon()
        return LinkStream(self, self._session, self._outgoing, stream_id)

    def new_transfer(self) -> int:
        """Return a number for the next transfer that this side sends."""
        self._last_transfer += 2
        return self._last_transfer

    def call_when_lost(self, fn: Callable[[PeerLost], None]) -> None:
        """Call ``fn`` once when the link ends, on a later tick; now if it has."""
        if self.error is not None:
            self._loop.call_soon(fn, _copy(self.error))
        else:
            self._when_lost.append(fn)

    def call_when_drained(self, fn: Callable[[], None]) -> None:
        """Call ``fn`` once, when less than 1 MiB waits to leave, or all is lost."""
        self._outgoing.call_when_drained(fn)

    async def aclose(self) -> None:
        """Say goodbye behind all that is queued, and hang up.

        Requests that are open end at once. Waits at most 1 s for the peer and
        1 s for the payload transport; a cancellation aborts.
        """
        try:
            with anyio.move_on_after(_GRACE_S, shield=True):
                self._say_goodbye()
                await self.wait_closed()
        finally:
            self.abort()
            await self.payload.aclose()

    async def wait_closed(self) -> None:
        """Wait until the link is over and its control connection closed."""
        await asyncio.wait({self._closed})

    def abort(self, error: Exception | None = None) -> None:
        """Close now, without a word. Every open request ends with PeerLost."""
        if error is None:
            error = PeerLost(f"the link to {self.peer.id} was aborted on this side")
        self._end_at_once(error)

    # What the stream says.

    def on_bytes(self, data: bytes) -> None:
        if self.error is not None:
            return
        self._heartbeat.was_heard = True
        self._events = self._session.receive(data)
        self._handle_events()

    def on_writable(self) -> None:
        self._outgoing.flush()

    def on_end(self, error: OSError | None) -> None:
        if error is not None:
            lost = PeerLost(f"the connection to {self.peer.id} broke: {error}")
        elif self._session.is_between_frames:
            lost = PeerLost(f"{self.peer.id} hung up without a goodbye")
        else:
            lost = PeerLost(f"{self.peer.id} hung up in the middle of a frame")
        lost.__cause__ = error
        self._end_at_once(lost)

    # Receiving.

    def _handle_events(self) -> None:
        outgoing, outbox = self._outgoing, self._session.outbox
        outgoing.will_flush = True
        try:
            for event in self._events:
                if type(event) is Came:
                    event.owner.on_frame(event.frame, event.body)
                else:
                    self._handle(event)
                if self.error is not None:
                    break
                if outbox.answer_bytes > outgoing.max_answer_bytes:
                    if not outgoing.make_room():
                        break
        except ProtocolError as exc:
            self._break(exc)
        except Exception as exc:
            logger.exception("a request handler of the link to %s", self.peer.id)
            self.abort(exc)
        outgoing.end_handling()

    def _read_on(self) -> None:
        if self.error is None and not self._outgoing.is_reading_paused:
            self._handle_events()
        if self.error is None and not self._outgoing.is_reading_paused:
            self._stream.resume_reading()

    def _handle(self, event: Event[StreamHandler]) -> None:
        if isinstance(event, Opened):
            self._open(event)
        elif isinstance(event, Farewell):
            self._on_farewell(event.reason)
        elif isinstance(event, Refused):
            self._end_at_once(
                PeerLost(f"{self.peer.id} closed the link: {event.error.message}")
            )

    def _open(self, event: Opened) -> None:
        session = self._session
        stream = LinkStream(self, session, self._outgoing, event.stream)
        try:
            if self._service is None:
                raise WrongRole("this side of the link serves nothing")
            handler = self._service.open(stream, event.frame, event.body)
        except RemoteProtocolError:
            raise
        except (AsyncKVError, KeyError, ValueError) as exc:
            stream.send(to_failure(exc))
        else:
            session.attach(event.stream, handler)

    def _on_farewell(self, reason: str) -> None:
        error = PeerLost(f"{self.peer.id} said goodbye{reason and f': {reason}'}")
        error.goodbye = True
        self._lose(error)
        self.payload.abort()
        self._session.outbox.clear()
        self._hang_up()

    # The end.

    def _end_at_once(self, error: Exception) -> None:
        self._lose(error)
        self._close()

    def _say_goodbye(self) -> None:
        if self.error is not None:
            return
        self._session.say_goodbye()
        error = PeerLost(f"the link to {self.peer.id} was closed on this side")
        error.goodbye = True
        self._lose(error)
        self._hang_up()

    def _break(self, error: ProtocolError) -> None:
        """End for ever, after one last word to the peer."""
        logger.warning("the link to %s broke: %s", self.peer.id, error)
        self._session.refuse(error)
        self._lose(error)
        self.payload.abort()
        self._hang_up()

    def _on_silence(self) -> None:
        interval_s = self.limits.heartbeat_ms / 1000
        what = "does not read" if self._outgoing.is_reading_paused else "was silent"
        self.abort(
            PeerLost(
                f"{self.peer.id} {what} for 3 heartbeats of {interval_s:g} s",
                hint="frozen, overloaded or cut off; raise Limits.heartbeat_ms "
                "if it is only slow",
            )
        )

    def _on_beat(self) -> None:
        if self._outgoing.is_reading_paused and self._outgoing.judge_reader():
            self._heartbeat.was_heard = True
        self._session.ping(next(self._pings))
        self._outgoing.flush()

    def _lose(self, error: Exception) -> None:
        if self.error is not None:
            return
        if not isinstance(error, PeerLost):
            lost = PeerLost(f"the link to {self.peer.id} broke: {error}")
            lost.__cause__ = error
            error = lost
        self.error = error
        self._heartbeat.stop()
        logger.debug("the link to %s ended: %s", self.peer.id, error)
        self._session.end_streams()
        self._loop.call_soon(self._tell_lost, error)
        self._outgoing.tell_drained()

    def _tell_lost(self, error: PeerLost) -> None:
        for handler in self._session.take_lost():
            self._tell(handler.on_lost, error)
        for fn in self._when_lost:
            self._tell(fn, error)
        self._when_lost.clear()

    def _tell(self, fn: Callable[[PeerLost], None], error: PeerLost) -> None:
        try:
            fn(_copy(error))
        except Exception:
            # The others are told too, whatever one of them does.
            logger.exception("told of the loss of %s", self.peer.id)

    def _hang_up(self) -> None:
        self._outgoing.finish()
        if self._grace is None and not self._closed.done():
            self._grace = self._loop.call_later(_GRACE_S, self._close)

    def _close(self) -> None:
        if self._closed.done():
            return
        self._closed.set_result(None)
        if self._grace is not None:
            self._grace.cancel()
        self._heartbeat.stop()
        self._outgoing.stop()
        self._stream.abort()
        self.payload.abort()


def _copy(error: PeerLost) -> PeerLost:
    # Each who raises it gets one of its own: tracebacks and contexts would mix.
    copy = PeerLost(error.message, hint=error.hint)
    copy.goodbye = error.goodbye
    copy.__cause__ = error.__cause__
    return copy
