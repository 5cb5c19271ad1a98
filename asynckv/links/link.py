"""One connection to one peer, shared by any number of requests.

Everything but closing is a plain function: what is sent is queued whole and
written once a tick; what comes is handed on from the socket's own callback.
So nothing that is cancelled ever tears a frame, and no reader waits for an
application. Lanes may be cut where the control connection lives, or the peer may never
send what it was granted: payload that stands still ends the link.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final, Protocol

import anyio
import msgspec

from asynckv.abc import PayloadTransport
from asynckv.errors import AsyncKVError, PeerLost, RemoteProtocolError, WrongRole
from asynckv.links.end import GRACE_S, Heartbeat, LinkEnd, copy_of
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

__all__ = (
    "OWN_WORK_S",
    "STALL_S",
    "Link",
    "LinkStream",
    "Progress",
    "RequestTiming",
    "Service",
    "TimedStream",
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
        if self._session.has_streams_left:
            self._outgoing.flush_first()
        else:  # it is as lost as others that are open: they are asked for again
            self.abort(PeerLost(f"the link to {self.peer.id} has used up its streams"))
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
