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
from collections.abc import Callable
from typing import Final, Protocol

import anyio

from asynckv.errors import (
    AsyncKVError,
    PeerLost,
    ProtocolError,
    RemoteProtocolError,
    WrongRole,
)
from asynckv.links.heartbeat import Heartbeat
from asynckv.links.payloads import make_payload
from asynckv.links.streams import ControlStream
from asynckv.protocol.codec import Buffer
from asynckv.protocol.failures import to_failure
from asynckv.protocol.frames import Frame, OpeningFrame
from asynckv.protocol.handshake import Agreement
from asynckv.protocol.session import Came, Event, Farewell, Opened, Session

__all__ = ("Link", "LinkStream", "Service", "StreamHandler")

logger = logging.getLogger(__name__)

_WRITE_BYTES: Final = 256 * 1024
_MAX_ANSWER_BYTES: Final = 4 * 2**20
_MAX_STUCK_ANSWER_BYTES: Final = 4 * _MAX_ANSWER_BYTES
_LOW_BYTES: Final = 2**20
_GRACE_S: Final = 1.0


class StreamHandler(Protocol):
    """Who hears of one stream. Plain functions on the loop; never waited for.

    A :exc:`~asynckv.errors.ProtocolError` from :meth:`on_frame` breaks the
    link and tells the peer why. Any other exception is a fault of ours: it is
    logged and the link is aborted.
    """

    def on_frame(self, frame: Frame, body: bytes) -> None:
        """A frame came, with its whole body."""

    def on_lost(self, error: PeerLost) -> None:
        """The link ended before the stream did. Called once, on a later tick.

        ``error.goodbye`` tells a clean close by either side from a loss.
        """


class Service(Protocol):
    """Who answers the requests of a peer."""

    def open(
        self, stream: LinkStream, frame: OpeningFrame, body: bytes
    ) -> StreamHandler:
        """The peer opens ``stream``; return who hears of it from here on.

        What it raises is sent as the stream's Failure; a
        :exc:`~asynckv.errors.RemoteProtocolError` breaks the link.
        """


class LinkStream:
    """One request and all that follows from it, on either side."""

    __slots__ = ("handler", "id", "link")

    def __init__(
        self, link: Link, stream_id: int, handler: StreamHandler | None = None
    ) -> None:
        self.link = link
        self.id = stream_id
        self.handler = handler

    def send(self, frame: Frame, body: Buffer = b"") -> None:
        """Queue a frame; nothing happens if stream or link are over.

        Never waits. ``body`` may be overwritten on return. The responder's
        final frame (Accepted, Result, Failure, Cancelled) ends the stream.

        :raises LocalProtocolError: it is longer than ``link.limits``
        """
        self.link._send(self.id, frame, body)

    def close(self) -> None:
        """Forget the stream: its handler hears nothing more, nor of a loss."""
        self.link._session.close(self.id)


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
        self._session: Session[LinkStream] = Session(agreement.limits, dialled=dialled)
        self._service: Service | None = None
        # Both directions share one payload transport: their numbers differ.
        self._transfers = itertools.count(1 if dialled else 2, 2)
        self._pings = itertools.count(1)
        self._flushing: asyncio.Handle | None = None
        self._hanging_up = False
        self._reading_paused = False
        self._max_answer_bytes = _MAX_ANSWER_BYTES
        self._sent_at_beat = 0
        self._when_lost: list[Callable[[PeerLost], None]] = []
        self._when_drained: list[Callable[[], None]] = []
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
        return self._session.outbox.nbytes + self._stream.unsent_bytes

    def start(self, service: Service | None) -> None:
        """Begin to read. Called once, by whoever made the link."""
        self._service = service
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
        stream = LinkStream(self, self._session.next_stream(), handler)
        self._session.open(stream.id, stream, frame, body)
        self._flush_soon()
        return stream

    def new_transfer(self) -> int:
        """Return a number for the next transfer that this side sends."""
        return next(self._transfers)

    def call_when_lost(self, fn: Callable[[PeerLost], None]) -> None:
        """Call ``fn`` once when the link ends, on a later tick; now if it has."""
        if self.error is not None:
            self._loop.call_soon(fn, _copy(self.error))
        else:
            self._when_lost.append(fn)

    def call_when_drained(self, fn: Callable[[], None]) -> None:
        """Call ``fn`` once, when less than 1 MiB waits to leave, or all is lost."""
        if self.outgoing_bytes < _LOW_BYTES or self.error is not None:
            self._loop.call_soon(fn)
        else:
            self._when_drained.append(fn)

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

    def on_bytes(self, data: memoryview) -> None:
        if self.error is not None:
            return
        self._heartbeat.was_heard = True
        try:
            for event in self._session.receive(data):
                self._handle(event)
                if self.error is not None:
                    break
        except ProtocolError as exc:
            self._break(exc)
        except Exception as exc:
            logger.exception("a request handler of the link to %s", self.peer.id)
            self.abort(exc)
        self._flush()

    def on_writable(self) -> None:
        self._flush()

    def on_end(self, error: OSError | None) -> None:
        if error is not None:
            lost = PeerLost(f"the connection to {self.peer.id} broke: {error}")
        elif self._session.is_between_frames:
            lost = PeerLost(f"{self.peer.id} hung up without a goodbye")
        else:
            lost = PeerLost(f"{self.peer.id} hung up in the middle of a frame")
        lost.__cause__ = error
        self._end_at_once(lost)

    # Sending.

    def _send(self, stream_id: int, frame: Frame, body: Buffer) -> None:
        if self.error is None and self._session.send(stream_id, frame, body):
            self._flush_soon()

    def _flush_soon(self) -> None:
        if self._flushing is None:
            self._flushing = self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        stream, outbox = self._stream, self._session.outbox
        while outbox.nbytes and not stream.unsent_bytes:
            stream.write(outbox.take(_WRITE_BYTES))
        if outbox.answer_bytes > self._max_answer_bytes:
            self._reading_paused = True
            stream.pause_reading()
        elif self._reading_paused and outbox.answer_bytes <= _LOW_BYTES:
            self._max_answer_bytes = _MAX_ANSWER_BYTES
            self._read_on()
        if self._when_drained and self.outgoing_bytes < _LOW_BYTES:
            self._tell_drained()
        if self._hanging_up and not outbox.nbytes:
            stream.finish()

    def _read_on(self) -> None:
        self._reading_paused = False
        self._stream.resume_reading()

    def _tell_drained(self) -> None:
        waiting, self._when_drained = self._when_drained, []
        for fn in waiting:
            self._loop.call_soon(fn)

    # Receiving.

    def _handle(self, event: Event[LinkStream]) -> None:
        if isinstance(event, Came):
            if event.owner.handler is not None:
                event.owner.handler.on_frame(event.frame, event.body)
        elif isinstance(event, Opened):
            self._open(event)
        elif isinstance(event, Farewell):
            self._on_farewell(event.reason)
        else:
            self._end_at_once(
                PeerLost(f"{self.peer.id} closed the link: {event.error.message}")
            )

    def _open(self, event: Opened) -> None:
        stream = LinkStream(self, event.stream)
        try:
            if self._service is None:
                raise WrongRole("this side of the link serves nothing")
            stream.handler = self._service.open(stream, event.frame, event.body)
        except RemoteProtocolError:
            raise
        except (AsyncKVError, KeyError, ValueError) as exc:
            stream.send(to_failure(exc))
        else:
            self._session.attach(stream.id, stream)

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
        what = "does not read" if self._reading_paused else "was silent"
        self.abort(
            PeerLost(
                f"{self.peer.id} {what} for 3 heartbeats of {interval_s:g} s",
                hint="frozen, overloaded or cut off; raise Limits.heartbeat_ms "
                "if it is only slow",
            )
        )

    def _on_beat(self) -> None:
        sent = self._stream.sent_bytes
        if self._reading_paused:
            self._judge_reader(has_progress=sent != self._sent_at_beat)
        self._sent_at_beat = sent
        self._session.ping(next(self._pings))
        self._flush()

    def _judge_reader(self, *, has_progress: bool) -> None:
        # While nothing is read silence means nothing, but a peer that takes what
        # we send lives. If neither reads because both wait for the other, one
        # has to give way: once or twice, for a peer that never reads.
        if has_progress:
            self._heartbeat.was_heard = True
        elif self._max_answer_bytes < _MAX_STUCK_ANSWER_BYTES:
            self._max_answer_bytes *= 2
            self._read_on()

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
        streams = self._session.take_owners()
        told: list[Callable[[PeerLost], None]]
        told = [stream.handler.on_lost for stream in streams if stream.handler]
        told.extend(self._when_lost)
        self._when_lost = []
        self._loop.call_soon(self._tell_lost, told, error)
        self._tell_drained()

    def _tell_lost(
        self, told: list[Callable[[PeerLost], None]], error: PeerLost
    ) -> None:
        for fn in told:
            try:
                fn(_copy(error))
            except Exception:
                logger.exception("a listener to the loss of %s", self.peer.id)

    def _hang_up(self) -> None:
        self._hanging_up = True
        self._read_on()
        self._flush()
        if self._grace is None and not self._closed.done():
            self._grace = self._loop.call_later(_GRACE_S, self._close)

    def _close(self) -> None:
        if self._closed.done():
            return
        self._closed.set_result(None)
        for handle in (self._grace, self._flushing):
            if handle is not None:
                handle.cancel()
        self._heartbeat.stop()
        self._session.outbox.clear()
        self._stream.abort()
        self.payload.abort()


def _copy(error: PeerLost) -> PeerLost:
    # Each who raises it gets one of its own: tracebacks and contexts would mix.
    copy = PeerLost(error.message, hint=error.hint)
    copy.goodbye = error.goodbye
    copy.__cause__ = error.__cause__
    return copy
