"""One connection to one peer, shared by any number of requests.

Everything but closing is a plain function: what is sent is queued whole and
written once a tick; what comes is handed on from the socket's own callback.
So nothing that is cancelled ever tears a frame, and no reader waits for an
application.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Final, Protocol

import anyio
import msgspec

from asynckv.errors import AsyncKVError, PeerLost, RemoteProtocolError, WrongRole
from asynckv.links.end import GRACE_S, Heartbeat, LinkEnd, Progress, copy_of
from asynckv.links.options import make_payload
from asynckv.links.reader import LinkReader, Turns
from asynckv.links.streams import ControlStream, LinkWriter, StreamHandler
from asynckv.observability.latencies import LatencyHistogram
from asynckv.protocol.codec import BODY_PART_BYTES, Buffer
from asynckv.protocol.failures import to_failure
from asynckv.protocol.frames import Cancelled, Failure, Frame, OpeningFrame
from asynckv.protocol.handshake import Agreement
from asynckv.protocol.limits import Unfinished
from asynckv.protocol.session import ROLES, Opened, Role, Session

__all__ = ("Link", "LinkStream", "RequestTiming", "Service", "TimedStream")


class Service(Protocol):
    """Who answers the requests of a peer."""

    def open(
        self, stream: LinkStream, frame: OpeningFrame, body: bytes
    ) -> StreamHandler:
        """The peer opens ``stream``; return who hears of it from here on.

        An ``AsyncKVError``, ``KeyError`` or ``ValueError`` is sent as the
        stream's Failure; a :exc:`~asynckv.errors.RemoteProtocolError` breaks
        the link. Anything else is a fault of ours and aborts the link.
        """


class Link:
    """A connection that is up. Made by :func:`dial` and by a listener.

    ``limits`` is what both sides keep to, ``peer_limits`` what the peer said
    of itself, ``lanes`` how many carry payload. ``own_host`` and ``peer_host``
    are the IP addresses of both ends as the kernel has them, empty within this
    host. ``may_map`` tells whether both sides would share memory. ``progress``
    watches payload that is to come. ``turns`` and ``unfinished`` are shared with
    the other links of a listener.
    """

    def __init__(
        self,
        stream: ControlStream,
        agreement: Agreement,
        *,
        dialled: bool,
        url: str = "",
        turns: Turns | None = None,
        unfinished: Unfinished | None = None,
    ) -> None:
        self.peer = agreement.peer
        self.certified_names = agreement.certified_names
        self.fingerprint = agreement.fingerprint
        self.has_one_fingerprint = agreement.has_one_fingerprint
        self.limits = agreement.limits
        self.peer_limits = agreement.peer_limits
        self.may_map = agreement.payload_path == "map"
        self.transport_name = "inline" if self.may_map else agreement.payload_path
        self.digest = agreement.digest
        self.lanes = agreement.lanes
        self.url = url
        self.own_host = stream.own_host
        self.peer_host = stream.peer_host
        self.loop = loop = asyncio.get_running_loop()
        self.payload = make_payload(agreement, loop, self.abort)
        self._stream = stream
        self._session: Session[StreamHandler]
        self._session = Session(agreement.limits, dialled=dialled)
        # Both directions share one payload transport: their numbers differ.
        self._last_transfer = -1 if dialled else 0
        self._pings = itertools.count(1)
        self._heartbeat = Heartbeat(
            loop,
            agreement.limits.heartbeat_ms / 1000,
            beat=self._on_beat,
            dead=self._on_silence,
        )
        self._outgoing = LinkWriter(stream, self._session.outbox, loop, self._read_on)
        shared = stream, self._session, self._outgoing
        self._ending = LinkEnd(self.peer.id, *shared, self.payload, self._heartbeat)
        if unfinished is not None:
            self._session.share(unfinished, self._ending.refuse)
        self.progress = Progress(self.payload, self._ending.refuse)
        self._ending.call(lambda _: self.progress.stop())
        self._service: Service | None = None
        self._incoming = LinkReader(
            *(agreement, *shared, self._ending, self._heartbeat, turns or Turns(loop)),
            opened=self._open,
        )

    def __repr__(self) -> str:
        state = "open" if self.is_open else "lost"
        return f"<Link to {self.peer.id} by {self.transport_name}, {state}>"

    @property
    def error(self) -> PeerLost | None:
        """How the link ended, once it has."""
        return self._ending.error

    @property
    def is_open(self) -> bool:
        """Whether requests can still be made."""
        return self._ending.error is None

    @property
    def was_answered(self) -> bool:
        """Whether a request of this side has come to its end."""
        return self._session.was_answered

    @property
    def outgoing_bytes(self) -> int:
        """Bytes of frames that have not left for the kernel yet."""
        return self._session.outbox.nbytes + self._stream.unsent_bytes

    def start(self, service: Service | None) -> None:
        """Begin to read. Called once, by whoever made the link."""
        self._service = service
        if self.is_open:
            self._stream.start(self._incoming)
            self._heartbeat.start()

    def open_stream(
        self, handler: StreamHandler, frame: OpeningFrame, body: Buffer = b""
    ) -> LinkStream:
        """Make a request; ``handler`` hears what follows. Never waits.

        :raises PeerLost: the link is over
        :raises LocalProtocolError: the frame is too long, or too many are open
        """
        if self._ending.error is not None:
            raise copy_of(self._ending.error)
        stream_id = self._session.open(handler, frame, body)
        self._outgoing.flush_first()
        return LinkStream(self, self._session, self._outgoing, stream_id)

    def use_map(self) -> None:
        """It was proved that memory is shared: payload is read where it lies."""
        self.transport_name = "map"

    def use_ipc(self) -> None:
        """It was proved that memory of a GPU is shared: payload is read there."""
        self.transport_name = "cuda_ipc"

    def use_nccl(self) -> None:
        """Memory of two GPUs is connected: payload goes from one to the other."""
        self.transport_name = "nccl"

    def use_lanes(self) -> None:
        """What was shared or connected is no more: payload goes by lanes again."""
        self.transport_name = "inline"

    def has_numbered(self, transfer: int) -> bool:
        """Whether a number was given out for a transfer that this side sends."""
        return transfer <= self._last_transfer

    def new_transfer(self) -> int:
        """Return a number for the next transfer that this side sends."""
        self._last_transfer += 2
        return self._last_transfer

    def call_when_lost(self, fn: Callable[[PeerLost], None]) -> None:
        """Call ``fn`` once when the link ends, on a later tick; now if it has."""
        self._ending.call(fn)

    def call_when_drained(self, fn: Callable[[], None]) -> None:
        """Call ``fn`` once, when less than 1 MiB waits to leave, or all is lost."""
        self._outgoing.call_when_drained(fn)

    def call_when_answered(self, fn: Callable[[], None]) -> None:
        """Call ``fn`` once, behind the answers to what is being handled now.

        For what need not be done before they have left. It runs in this tick,
        also if the link is lost meanwhile; on the next one if nothing is being
        handled.
        """
        self._outgoing.call_when_answered(fn)

    async def aclose(self) -> None:
        """Say goodbye behind all that is queued, and hang up.

        Requests that are open end at once. Waits at most 1 s for the peer and
        1 s for the payload transport; a cancellation aborts.
        """
        try:
            with anyio.move_on_after(GRACE_S, shield=True):
                self._ending.say_goodbye()
                await self.wait_closed()
        finally:
            self.abort()
            await self.payload.aclose()

    async def wait_closed(self) -> None:
        """Wait until the link is over and its control connection closed."""
        await self._ending.wait()

    def abort(self, error: Exception | None = None) -> None:
        """Close now, without a word. Every open request ends with PeerLost."""
        if error is None:
            error = PeerLost(f"the link to {self.peer.id} was aborted on this side")
        self._ending.at_once(error)

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
            if (error := self._ending.error) is not None:
                handler.on_lost(error)  # lost meanwhile, when it was not there

    def _read_on(self) -> None:
        self._incoming.read_on()

    def _on_silence(self) -> None:
        interval_s = self.limits.heartbeat_ms / 1000
        what = "does not read" if self._outgoing.is_reading_paused else "was silent"
        self.abort(
            PeerLost(
                f"{self.peer.id} {what} for 3 heartbeats of {interval_s:g} s",
                hint="frozen, overloaded or cut off; raise Limits.heartbeat_ms "
                "if it is only slow (its lanes are given up after 30 s)",
            )
        )

    def _on_beat(self) -> None:
        if self._outgoing.is_reading_paused and self._outgoing.judge_reader():
            self._heartbeat.has_received = True
        self._session.ping(next(self._pings))
        self._outgoing.flush()


_ANSWERS: Final = frozenset(
    kind for kind, role in ROLES.items() if role is Role.ANSWERS_LAST
)


class RequestTiming(LatencyHistogram):
    """How long requests of one kind took, from their frame to an ``ended_by``."""

    __slots__ = ("ended_by",)

    def __init__(self, ended_by: type) -> None:
        super().__init__()
        self.ended_by = ended_by


class LinkStream(msgspec.Struct, eq=False):
    """A stream of a link, as the side that asks and the side that answers see it."""

    # A Struct, because two are made for each request.
    link: Link
    _session: Session[StreamHandler]
    _outgoing: LinkWriter
    id: int

    def __repr__(self) -> str:
        return f"<LinkStream {self.id} of {self.link!r}>"

    def send(self, frame: Frame, body: Buffer = b"") -> None:
        """Queue a frame; nothing happens if stream or link are over.

        Never waits. ``body`` may be overwritten on return. The responder's
        final frame (Accepted, Result, Failure, Cancelled) ends the stream,
        unless it was opened by OpenPipe: then only a Failure does.

        :raises LocalProtocolError: it is longer than ``link.limits``
        """
        is_queued = self._session.send(self.id, frame, body)
        if not is_queued or self._outgoing.will_flush:
            return
        if type(frame) in _ANSWERS:
            self._outgoing.flush_first()  # by what has ended: nothing follows soon
        else:
            self._outgoing.flush_soon()

    def send_at_once(self, frame: Frame, body: Buffer = b"") -> None:
        """As :meth:`send`, of a frame that is not a stream's last or first.

        It is written now, unless something was in this tick already.
        """
        outgoing, session = self._outgoing, self._session
        if outgoing.may_write and len(body) <= BODY_PART_BYTES:
            if data := session.pack(self.id, frame, bytes(body)):
                outgoing.write_first(data)
        elif session.send(self.id, frame, body):
            outgoing.flush_first()

    def close(self) -> None:
        """Forget the stream: its handler hears nothing more, nor of a loss."""
        self._session.close(self.id)


class TimedStream(LinkStream):
    """A stream whose time since ``began_s`` is counted once.

    That is when what ends it is sent, or when it is closed without a failure.
    """

    # No part of any stream: of those that wait there are many, which are not timed.
    timing: RequestTiming | None = None
    began_s: float = 0.0

    def send(self, frame: Frame, body: Buffer = b"") -> None:
        LinkStream.send(self, frame, body)
        self._look_at_time(type(frame))

    def close(self) -> None:
        LinkStream.close(self)
        if self.timing is not None and self.link.is_open:
            self._look_at_time(self.timing.ended_by)

    def _look_at_time(self, sent: type[Frame]) -> None:
        if self.timing is not None and sent is self.timing.ended_by:
            self.timing.observe(time.perf_counter() - self.began_s)
            self.timing = None
        elif sent is Failure or sent is Cancelled:
            self.timing = None
