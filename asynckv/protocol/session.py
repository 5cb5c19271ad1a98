"""One side of an open link: its streams, its pings, its goodbye. No I/O.

Feed it what was received, take its events, one for each received frame; send through
it, and take from its outbox the bytes to write. Each stream carries what its owner
attached to it. What each frame does to its stream is one look into a table; ids of
streams are odd for who dialled.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import Final, Generic, NamedTuple, TypeVar, get_args

import msgspec

from asynckv.errors import AsyncKVError, LocalProtocolError, RemoteProtocolError
from asynckv.protocol.codec import Buffer, FrameDecoder, encode_plain
from asynckv.protocol.failures import from_refuse, to_refuse
from asynckv.protocol.frames import (
    Accepted,
    Attach,
    Attached,
    Cancelled,
    Challenge,
    Failure,
    Frame,
    Goodbye,
    Hello,
    OpeningFrame,
    OpenPipe,
    Ping,
    Pong,
    Proof,
    Refuse,
    Result,
    Took,
    Welcome,
)
from asynckv.protocol.limits import Share, Unfinished
from asynckv.protocol.outbox import Outbox
from asynckv.protocol.values import Limits

__all__ = (
    "MAX_STREAM",
    "ROLES",
    "Came",
    "Event",
    "Farewell",
    "Nothing",
    "Opened",
    "Refused",
    "Role",
    "Session",
    "StreamIds",
)


T = TypeVar("T")


class Opened(msgspec.Struct, frozen=True, gc=False):
    """The peer opens a stream; attach something to it, or it is ignored."""

    stream: int
    frame: OpeningFrame
    body: bytes


class Came(msgspec.Struct, Generic[T], frozen=True):
    """A frame for the stream to which ``owner`` was attached.

    Unlike others it is seen by the garbage collector: an owner that keeps an error
    keeps the frames of its traceback, and these the event.
    """

    owner: T
    frame: Frame
    body: bytes


class Farewell(NamedTuple):
    """The peer closes cleanly; nothing follows."""

    reason: str


class Refused(NamedTuple):
    """The peer says that we broke the rules; nothing follows."""

    error: AsyncKVError


class Nothing(NamedTuple):
    """A frame that nobody else need hear of, as a ping."""


Event = Opened | Came[T] | Farewell | Refused | Nothing


class Role(enum.Enum):
    """What a frame is to its stream."""

    OPENS = "the requester begins"
    GOES_ON = "either side, in between"
    ASKS_LAST = "the requester ends it"
    ANSWERS_LAST = "the responder ends it (a pipe: a Failure only)"
    OF_THE_LINK = "on no stream"


ROLES: Final[dict[type, Role]] = {
    **dict.fromkeys(get_args(Frame), Role.GOES_ON),
    **dict.fromkeys(get_args(OpeningFrame), Role.OPENS),
    **dict.fromkeys((Accepted, Result, Failure, Cancelled), Role.ANSWERS_LAST),
    **dict.fromkeys((Hello, Challenge, Proof, Welcome, Refuse), Role.OF_THE_LINK),
    **dict.fromkeys((Attach, Attached, Ping, Pong, Goodbye), Role.OF_THE_LINK),
    Took: Role.ASKS_LAST,
}


MAX_STREAM: Final = 2**32 - 1


class StreamIds:
    """The ids of one side and of its peer, each used once.

    Own ids grow by 2. Those of the peer do so about: a stream whose body is long
    may be passed by at most ``max_skipped`` later ones.
    """

    __slots__ = ("_max_skipped", "_skipped", "last_own", "last_theirs", "parity")

    def __init__(self, *, dialled: bool, max_skipped: int) -> None:
        self.parity = 1 if dialled else 0
        self.last_own = -1 if dialled else 0
        self.last_theirs = 0 if dialled else -1
        # Below the last: their frame is still coming, others have passed it.
        self._skipped: set[int] = set()
        self._max_skipped = max_skipped

    def next_own(self) -> int:
        """Return the id of the next own stream, which is not used by that yet.

        :raises LocalProtocolError: all are used up
        """
        stream = self.last_own + 2
        if stream > MAX_STREAM:
            raise LocalProtocolError("this link has used up its streams; reconnect")
        return stream

    def take_theirs(self, stream: int) -> bool:
        """Note that the peer has used ``stream``; ``False`` if it cannot."""
        if stream <= self.last_theirs:
            if stream not in self._skipped:
                return False
            self._skipped.remove(stream)
            return True
        skipped = range(self.last_theirs + 2, stream, 2)
        if len(skipped) + len(self._skipped) > self._max_skipped:
            return False
        self._skipped.update(skipped)
        self.last_theirs = stream
        return True

    def was_used(self, stream: int) -> bool:
        """Whether ``stream`` has ever been open, on either side."""
        if stream & 1 == self.parity:
            return stream <= self.last_own
        return stream <= self.last_theirs and stream not in self._skipped


_OPENS: Final = Role.OPENS
_GOES_ON: Final = Role.GOES_ON
_ASKS_LAST: Final = Role.ASKS_LAST
_ANSWERS_LAST: Final = Role.ANSWERS_LAST
_OF_THE_LINK: Final = Role.OF_THE_LINK
_NOTHING: Final = Nothing()


class _Over(enum.Enum):
    FORGOTTEN = enum.auto()


_FORGOTTEN: Final = _Over.FORGOTTEN


class Session(Generic[T]):
    """The state of one side of a link, from the Welcome to the goodbye.

    A stream is over with the responder's final frame or the requester's ``Took``,
    on both sides; one that was opened by ``OpenPipe`` with a Failure, or when its
    owner closes it. A requester that closes a stream early no longer hears of it,
    but it counts towards ``max_streams`` until the final frame has come.

    ``opened_count`` and ``cancelled_count`` are of the peer's requests, ever, and
    ``pinged_count`` of its pings.
    """

    def __init__(self, limits: Limits, *, dialled: bool) -> None:
        self.limits = limits
        self.outbox = Outbox(limits, own_parity=1 if dialled else 0)
        self.unanswered_ping: int | None = None
        self.decoder = FrameDecoder(limits)
        self._ids = StreamIds(dialled=dialled, max_skipped=limits.max_streams)
        self._parity = self._ids.parity
        self._streams: dict[int, T | _Over] = {}
        self._lost: dict[int, T | _Over] = {}
        # Whose last frame is being heard; not its owner, who is kept by nobody here.
        self._ending: int | None = None
        self._pipes: set[int] = set()
        self.opened_count = 0
        self.cancelled_count = 0
        self.pinged_count = 0
        self._own_count = 0
        self._their_count = 0
        self._ended = False

    @property
    def is_between_frames(self) -> bool:
        """Whether the peer may hang up here without cutting a frame."""
        return self.decoder.is_idle

    @property
    def has_streams_left(self) -> bool:
        """Whether this side can open one more, ever."""
        return self._ids.last_own + 2 <= MAX_STREAM

    @property
    def was_answered(self) -> bool:
        """Whether a stream that this side opened has come to its end."""
        return self._ids.last_own > 2 * self._own_count - self._parity

    def share(
        self, whole: Unfinished, give_way: Callable[[RemoteProtocolError], None]
    ) -> None:
        """Count what is under way with that of other links.

        ``give_way(error)`` is called when that is too much and this one is to end.
        """
        self.decoder.bodies.share = Share(whole, give_way)

    def end_streams(self) -> None:
        """End all streams on this side; nothing is sent on them any more."""
        self.decoder.bodies.clear()
        self._lost = dict(self._streams)
        self._streams.clear()

    def keep_ending(self, owner: T) -> None:
        """The frame that came was not taken: if it was the last one of its stream, let
        ``owner`` hear of the end.
        """
        if self._ending is not None:
            self._streams[self._ending] = owner

    def take_lost(self) -> Iterator[T]:
        """Yield who was attached at the end and has not closed its stream since."""
        for stream in list(self._lost):
            owner = self._lost.pop(stream, _FORGOTTEN)
            if owner is not _FORGOTTEN:
                yield owner

    def open(self, owner: T, frame: OpeningFrame, body: Buffer = b"") -> int:
        """Open a stream for ``owner``, queue its first frame, and return its id.

        :raises LocalProtocolError: the frame is too long, too many streams are
            open, or ids are used up; nothing was opened
        """
        if self._own_count + self.outbox.behind_count >= self.limits.max_streams:
            self._make_room()
        stream = self._ids.next_own()
        self.outbox.put(stream, frame, body)
        self._ids.last_own = stream
        self._own_count += 1
        self._streams[stream] = owner
        if type(frame) is OpenPipe:
            self._pipes.add(stream)
        return stream

    def _make_room(self) -> None:
        """Let the peer hear of every end before it hears of one stream more."""
        if self._own_count >= self.limits.max_streams:
            raise LocalProtocolError(
                f"{self._own_count} requests are open on this link already",
                hint="wait for some of them, or raise Limits.max_streams on both sides",
            )
        self.outbox.close_up()

    def attach(self, stream: int, owner: T) -> None:
        """Make ``owner`` the one who hears of a stream that the peer opened."""
        if stream in self._streams:
            self._streams[stream] = owner

    def send(self, stream: int, frame: Frame, body: Buffer = b"") -> bool:
        """Queue one frame; ``False``, and nothing, if the stream is over.

        :raises LocalProtocolError: the frame is too long; nothing was queued
        """
        if stream not in self._streams:
            return False
        role = ROLES[type(frame)]
        if role is _ASKS_LAST and stream & 1 == self._parity and not body:
            self.outbox.put_behind(stream, frame)
            self._finish(stream, frame)
            return True
        self.outbox.put(stream, frame, body)
        if role is _ANSWERS_LAST and stream & 1 != self._parity:
            self._finish(stream, frame)
            self.cancelled_count += type(frame) is Cancelled
        return True

    def pack(self, stream: int, frame: Frame, body: bytes) -> bytes:
        """Return the one wire frame of a frame that goes on, to be written now.

        For when nothing waits in the outbox. Nothing, if the stream is over.

        :raises LocalProtocolError: the frame is too long
        """
        if stream not in self._streams:
            return b""
        return encode_plain(stream, frame, body, self.limits)

    def close(self, stream: int) -> None:
        """Forget the owner of ``stream``; later frames for it are ignored."""
        if stream not in self._streams:
            self._lost.pop(stream, None)
            if self._ending == stream:
                self._ending = None
        elif stream & 1 == self._parity and stream not in self._pipes:
            self._streams[stream] = _FORGOTTEN
        else:
            self._pipes.discard(stream)
            self._remove(stream)

    def ping(self, nonce: int) -> None:
        """Queue a heartbeat, before everything that waits."""
        self.unanswered_ping = nonce
        self.outbox.put_first(Ping(nonce))

    def say_goodbye(self, reason: str = "") -> None:
        """Queue the goodbye, behind everything that waits; open no more."""
        self.outbox.put_last(Goodbye(reason[:2048]))

    def refuse(self, error: Exception) -> None:
        """Queue the last word of a broken link; nothing else is sent any more."""
        self._ended = True
        self.outbox.clear()
        self.outbox.put_first(to_refuse(error))

    def receive(self, data: Buffer) -> Iterator[Event[T]]:
        """Accept ``data`` and yield what each frame means. Iterate to the end.

        :raises RemoteProtocolError: the peer broke the rules; the link is dead
        """
        if self._ended:
            return iter(())
        self.decoder.feed(data)
        return iter(self._next_event, None)

    def _next_event(self) -> Event[T] | None:
        self._ending = None  # the event before was taken
        if self._ended or not self.decoder.has_unread:
            return None
        if (found := self.decoder.next_frame()) is None:
            return None
        stream, frame, body = found
        role = ROLES[type(frame)]
        owner = self._streams.get(stream)
        if role is _GOES_ON and owner is not None and owner is not _FORGOTTEN:
            return Came(owner, frame, body)
        if role is _OPENS and stream:
            return self._begin(stream, frame, body)
        event = self._judge(stream, role, frame, body)
        return _NOTHING if event is None else event

    def _judge(
        self, stream: int, role: Role, frame: Frame, body: bytes
    ) -> Event[T] | None:
        if not stream:
            return self._receive(frame, body)
        if role is _OF_THE_LINK:
            raise RemoteProtocolError(f"{type(frame).__name__} on a stream")
        owner = self._streams.get(stream)
        if owner is None:
            if not self._ids.was_used(stream):
                raise RemoteProtocolError(
                    f"{type(frame).__name__} for stream {stream}, never opened"
                )
            return None
        if role is not _GOES_ON:
            if (role is _ASKS_LAST) is (stream & 1 == self._parity):
                self._check_side(stream, role, frame)
            self._finish(stream, frame)
            if owner is not _FORGOTTEN and stream not in self._streams:
                self._ending = stream
        return None if owner is _FORGOTTEN else Came(owner, frame, body)

    def _check_side(self, stream: int, role: Role, frame: Frame) -> None:
        """Refuse a last frame from the side that cannot say it; a pipe has none."""
        if role is _ASKS_LAST:
            raise RemoteProtocolError(
                f"{type(frame).__name__} from the side that answers"
            )
        if stream not in self._pipes:
            raise RemoteProtocolError(f"{type(frame).__name__} from the side that asks")

    def _receive(self, frame: Frame, body: bytes) -> Farewell | Refused | None:
        kind = type(frame)
        if body:
            raise RemoteProtocolError(f"{kind.__name__} with a body")
        if isinstance(frame, Ping):
            self.pinged_count += 1
            self.outbox.put_first(Pong(frame.nonce))
        elif isinstance(frame, Pong):
            if frame.nonce == self.unanswered_ping:
                self.unanswered_ping = None
        elif isinstance(frame, Goodbye):
            self._ended = True
            return Farewell(frame.reason)
        elif isinstance(frame, Refuse):
            self._ended = True
            return Refused(from_refuse(frame))
        else:
            raise RemoteProtocolError(f"{kind.__name__} on an open link")
        return None

    def _begin(self, stream: int, frame: Frame, body: bytes) -> Opened:
        if stream & 1 == self._parity:
            raise _cannot_open(stream, frame)
        if self._their_count >= self.limits.max_streams:
            raise RemoteProtocolError(
                f"more than {self.limits.max_streams} streams at a time"
            )
        if stream == self._ids.last_theirs + 2:
            self._ids.last_theirs = stream
        elif not self._ids.take_theirs(stream):
            raise _cannot_open(stream, frame)
        self._their_count += 1
        self.opened_count += 1
        self._streams[stream] = _FORGOTTEN
        if type(frame) is OpenPipe:
            self._pipes.add(stream)
        return Opened(stream, frame, body)  # type: ignore[arg-type]

    def _finish(self, stream: int, frame: Frame) -> None:
        if stream in self._pipes:
            if type(frame) is not Failure:
                return
            self._pipes.discard(stream)
        self._remove(stream)

    def _remove(self, stream: int) -> None:
        del self._streams[stream]
        if stream & 1 == self._parity:
            self._own_count -= 1
        else:
            self._their_count -= 1


def _cannot_open(stream: int, frame: Frame) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"{type(frame).__name__} opens stream {stream}, which it cannot"
    )
