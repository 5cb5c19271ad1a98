"""A fault, and one direction of one connection, which asks it what to do.

A fault never waits and does no I/O. Each direction of each connection asks it,
piece by piece, how long to hold what comes, how much may go on, and as what.

A flow is plain functions that the event loop calls: nothing here is a task, so nothing
has to be cancelled. What has arrived stands in a line of bounded length; while
that is full nothing is read, so that the sender feels a receiver who is slow.

The first frame of a connection tells a link's control connection (Hello, answered by
Welcome) from its payload lanes (Attach). Whatever is no such frame passes as it came.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import math
import socket
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import (
    ClassVar,
    Final,
    Literal,
    NamedTuple,
    Protocol,
    Self,
    TypeAlias,
    get_args,
)

import msgspec

from asynckv.errors import RemoteProtocolError
from asynckv.protocol.codec import FrameDecoder, encode_frame
from asynckv.protocol.frames import Attach, Frame, Hello, Welcome
from asynckv.protocol.handshake import WELCOME_LIMITS
from asynckv.protocol.wire import (
    HEADER_BYTES,
    TYPE_CONTROL,
    pack_header,
    unpack_header,
)

__all__ = (
    "MAX_LINE_BYTES",
    "Cut",
    "Direction",
    "Fault",
    "FaultCounts",
    "Flow",
    "FlowOwner",
    "Greeting",
    "Kind",
    "Piece",
    "Wire",
)


_MAGIC: Final = pack_header(TYPE_CONTROL, 0, 0)[:4]
_MAX_BYTES: Final = HEADER_BYTES + WELCOME_LIMITS.max_control_bytes


class Greeting:
    """Holds back the first frame that passes until it is whole.

    With ``heartbeat_ms`` the limits that a Hello and its Welcome agree on have
    no longer heartbeat than that.
    """

    def __init__(self, heartbeat_ms: int | None = None) -> None:
        self.kind: Literal["control", "lanes", ""] = ""
        self._heartbeat_ms = heartbeat_ms
        self._held = bytearray()
        self._is_over = False

    def feed(self, data: bytes) -> bytes:
        """Return what may go on now that ``data`` has come."""
        if self._is_over:
            return data
        self._held += data
        if not self._held.startswith(_MAGIC[: len(self._held)]):
            return self.rest()
        if len(self._held) < HEADER_BYTES:
            return b""
        try:
            nbytes = _length_of(self._held)
            if nbytes > len(self._held):
                return b""
            first = self._received(bytes(self._held[:nbytes]))
        except RemoteProtocolError:
            return self.rest()
        return first + self.rest()[nbytes:]

    def rest(self) -> bytes:
        """Return what was held back; nothing is from now on."""
        self._is_over = True
        rest = bytes(self._held)
        self._held.clear()
        return rest

    def _received(self, data: bytes) -> bytes:
        frame: Frame
        _, frame, _ = next(FrameDecoder(WELCOME_LIMITS).feed(data))
        if isinstance(frame, Attach):
            self.kind = "lanes"
        elif isinstance(frame, Hello | Welcome):
            self.kind = "control"
            if self._heartbeat_ms is not None:
                return _quickened(frame, self._heartbeat_ms)
        return data


def _length_of(held: bytearray) -> int:
    """Return how long the frame is that begins here.

    :raises RemoteProtocolError: none does, or one that is no greeting
    """
    header = unpack_header(held)
    nbytes = HEADER_BYTES + header.control_bytes
    if header.type != TYPE_CONTROL or header.payload_bytes or nbytes > _MAX_BYTES:
        raise RemoteProtocolError("not a greeting")
    return nbytes


def _quickened(frame: Hello | Welcome, heartbeat_ms: int) -> bytes:
    limits = msgspec.structs.replace(
        frame.limits, heartbeat_ms=min(frame.limits.heartbeat_ms, heartbeat_ms)
    )
    return encode_frame(0, msgspec.structs.replace(frame, limits=limits))[0]


Direction: TypeAlias = Literal["to_listener", "to_dialler", "both"]
"""Which way the bytes go that a fault concerns."""

Kind: TypeAlias = Literal["control", "lanes", "both"]
"""Which connections a fault concerns: a link's one control, or its payload lanes.

Only the dialler's first bytes tell. A connection that has sent none, or none of
asynckv, is neither; ``"both"`` concerns it too.
"""


class Cut(Exception):
    """The connection ends here. Raised by a fault, never seen by its user."""

    def __init__(self, *, resets: bool) -> None:
        super().__init__(resets)
        self.resets = resets


class Wire(Protocol):
    """What a fault is put on: a :class:`Proxy`."""

    @property
    def url(self) -> str:
        """What to dial, instead of the listener."""

    def wake(self) -> None:
        """A fault was switched: let everything that is held be judged again."""


@dataclasses.dataclass(frozen=True)
class FaultCounts:
    """What a fault did, so that a test can prove that it happened.

    ``acts`` counts what it is there for: pieces held or sliced, bits flipped,
    connections ended. ``nbytes`` went through it (or were swallowed by it) while
    it was on, on ``connections``.
    """

    acts: int = 0
    nbytes: int = 0
    connections: int = 0


class Fault:
    """Something that goes wrong between two peers, from ``begin()`` to ``end()``.

    ``with fault:`` begins and ends it; it may begin again. By itself it does
    nothing: subclasses override what they need of the five methods at the end,
    which are called on the event loop and must not wait.

    :raises ValueError: there is no such ``direction``, or ``kind``
    """

    swallows: ClassVar[bool] = False
    """Whether bytes may be lost in it, and the connection has to outlive that."""

    def __init__(self, *, direction: Direction = "both", kind: Kind = "both") -> None:
        for given, known in ((direction, Direction), (kind, Kind)):
            if given not in get_args(known):  # it would concern nothing
                raise ValueError(f"{given!r} is none of {', '.join(get_args(known))}")
        self.direction = direction
        self.kind = kind
        self._wire: Wire | None = None
        self._is_on = False
        self._acts = 0
        self._nbytes = 0
        # Numbers, not flows: a connection has one for both directions.
        self._connections: set[int] = set()
        self._passed: weakref.WeakKeyDictionary[Flow, int]
        self._passed = weakref.WeakKeyDictionary()
        self._acted = asyncio.Event()

    def __repr__(self) -> str:
        state = "on" if self._is_on else "off"
        return f"<{type(self).__name__} of {self.direction}, {self.kind}: {state}>"

    @property
    def is_on(self) -> bool:
        """Whether it has begun and not ended."""
        return self._is_on

    @property
    def counts(self) -> FaultCounts:
        """What it did so far, in all."""
        return FaultCounts(self._acts, self._nbytes, len(self._connections))

    @property
    def url(self) -> str:
        """What to dial to get it: its proxy's.

        :raises RuntimeError: it is on no proxy
        """
        return self._on_a_wire().url

    def put_on(self, wire: Wire) -> None:
        """Belong to ``wire``; what :meth:`Proxy.add` does.

        :raises RuntimeError: it is on another one
        """
        if self._wire is not None:
            raise RuntimeError("a fault is for one proxy; make another one")
        self._wire = wire

    def begin(self) -> None:
        """Go wrong from now on. What it counts on each connection starts anew.

        :raises RuntimeError: it is on no proxy
        """
        wire = self._on_a_wire()
        self._is_on = True
        self._passed.clear()
        self._acted.clear()
        wire.wake()

    def end(self) -> None:
        """Go wrong no longer; what was done stays done. Safe to call again."""
        self._is_on = False
        if self._wire is not None:
            self._wire.wake()

    async def acted(self) -> None:
        """Wait until it has acted since it began. A cancelled call is no call."""
        await self._acted.wait()

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    def concerns(self, flow: Flow) -> bool:
        """Whether it is on, and meant for that direction of that connection."""
        return (
            self._is_on
            and self.direction in ("both", flow.direction)
            and self.kind in ("both", flow.kind)
        )

    def note(self, flow: Flow, *, acts: int = 0, nbytes: int = 0) -> None:
        """Count, for subclasses."""
        self._connections.add(flow.number)
        self._acts += acts
        self._nbytes += nbytes
        if acts:
            self._acted.set()

    def passed_bytes(self, flow: Flow) -> int:
        """How many bytes went on there since it began, for subclasses."""
        return self._passed.get(flow, 0)

    # What subclasses override.

    def judge(self, flow: Flow) -> None:
        """Look at a connection, at every turn. May raise :exc:`Cut`."""

    def delay_s(self, flow: Flow, piece: Piece, now: float) -> float:
        """Return for how long ``piece`` is held yet; ``inf``: until it ends."""
        return 0.0

    def allowance(self, flow: Flow) -> int | None:
        """Return how many bytes may go on in one write (1 or more), if bounded."""
        return None

    def change(self, flow: Flow, data: bytes) -> bytes:
        """Return what goes on instead of ``data``. May raise :exc:`Cut`."""
        return data

    def passed(self, flow: Flow, nbytes: int, now: float) -> None:
        """As many bytes have gone on. May raise :exc:`Cut`."""
        self._passed[flow] = self._passed.get(flow, 0) + nbytes

    def _on_a_wire(self) -> Wire:
        if self._wire is None:
            raise RuntimeError("the fault is on no proxy: proxy.add(fault)")
        return self._wire


MAX_LINE_BYTES: Final = 2**20
"""How much of a direction may be under way in the proxy (and one read beyond)."""
_MAX_PIECES: Final = 4096
_READ_BYTES: Final = 64 * 1024


class Piece(NamedTuple):
    """Bytes in the line, or the end of them."""

    arrived: float
    data: memoryview
    end: Literal["", "eof", "reset"] = ""


class FlowOwner(Protocol):
    """The connection, of which a flow is half."""

    @property
    def kind(self) -> Literal["control", "lanes", ""]:
        """What kind of connection it is; empty while that is not known."""

    def count(self, flow: Flow, sent: int, held: int) -> None:
        """``flow`` has sent, and holds, as many bytes."""

    def flow_is_over(self) -> None:
        """That direction has ended; the other may go on."""

    def cut(self, *, resets: bool) -> None:
        """End both directions now."""


class Flow:
    """Carries bytes from a source to a sink, as the faults let it.

    ``number`` is the connection's, and the same for both its directions.
    """

    def __init__(
        self,
        owner: FlowOwner,
        ends: tuple[socket.socket, socket.socket],
        direction: Literal["to_listener", "to_dialler"],
        number: int,
        greeting: Greeting,
        faults: Sequence[Fault],
    ) -> None:
        self.direction = direction
        self.number = number
        self.is_over = False
        self._owner = owner
        self._source, self._sink = ends
        self._greeting = greeting
        self._faults = faults
        self._loop = asyncio.get_running_loop()
        self._line: collections.deque[Piece] = collections.deque()
        self._line_bytes = 0
        # Taken from the line, changed by the faults, and being written.
        self._taken = Piece(0.0, memoryview(b""))
        self._unsent = b""
        self._reads = False
        self._writes = False
        self._is_shut = False
        self._is_torn = False
        self._next: asyncio.Handle | None = None

    @property
    def kind(self) -> Literal["control", "lanes", ""]:
        """What kind of connection it is of; empty while that is not known."""
        return self._owner.kind

    def start(self) -> None:
        """Begin to read and to pass on."""
        self._read_on()
        self.wake()

    def stop(self) -> None:
        """Touch neither socket any more. Safe to call again."""
        self.is_over = True
        self._pause_reading()
        self._stop_writing()
        if self._next is not None:
            self._next.cancel()
            self._next = None
        self._line.clear()

    def wake(self) -> None:
        """Judge anew what is held, on the next turn of the loop."""
        if not self.is_over:
            self._go_on(0)

    def shut(self) -> bool:
        """Tell the sink that this was all; what comes is read and dropped.

        Return whether that is new to it.
        """
        if self._is_shut:
            return False
        self._is_shut = True
        with contextlib.suppress(OSError):  # it has gone already
            self._sink.shutdown(socket.SHUT_WR)
        return True

    def tear(self) -> None:
        """Bytes are lost: the connection ends as soon as no fault swallows more."""
        self._is_torn = True

    # Reading.

    def _read(self) -> None:
        try:
            data = self._source.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._arrive(self._greeting.rest(), "reset")
            return
        if data:
            self._arrive(self._greeting.feed(data))
        else:
            self._arrive(self._greeting.rest(), "eof")

    def _arrive(self, data: bytes, end: Literal["", "eof", "reset"] = "") -> None:
        now = self._loop.time()
        if data:
            self._line.append(Piece(now, memoryview(data)))
            self._line_bytes += len(data)
        if end:
            self._line.append(Piece(now, memoryview(b""), end))
        if end or self._is_full():
            self._pause_reading()
        self._owner.count(self, 0, self._line_bytes)
        self.wake()

    def _read_on(self) -> None:
        if not self._reads:
            self._reads = True
            self._loop.add_reader(self._source, self._read)

    def _pause_reading(self) -> None:
        if self._reads:
            self._reads = False
            self._loop.remove_reader(self._source)

    # Passing on.

    def _go_on(self, delay_s: float) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if delay_s <= 0:
            self._next = self._loop.call_soon(self._turn)
        elif delay_s != math.inf:
            self._next = self._loop.call_later(delay_s, self._turn)

    def _turn(self) -> None:
        self._next = None
        try:
            delay_s = self._pass_some()
        except Cut as cut:
            self._owner.cut(resets=cut.resets)
            return
        if not self.is_over:
            self._go_on(delay_s)

    def _pass_some(self) -> float:
        """Do what can be done now; return how long to wait before the next turn."""
        faults = [fault for fault in self._faults if fault.concerns(self)]
        for fault in faults:
            fault.judge(self)
        if self._is_torn and not any(fault.swallows for fault in faults):
            raise Cut(resets=True)
        if not self._line and not self._unsent:
            return math.inf
        piece, now = self._taken if self._unsent else self._line[0], self._loop.time()
        delay_s = max((f.delay_s(self, piece, now) for f in faults), default=0.0)
        if delay_s > 0:
            return delay_s
        if piece.end:
            self._pass_end(piece)
            return math.inf
        if not self._unsent:
            self._unsent = self._take(faults)
        if self._is_shut:
            self._unsent = b""
        if self._unsent and not self._send(faults, now):
            return math.inf  # until the sink is writable, or a fault is switched
        return 0.0

    def _take(self, faults: Sequence[Fault]) -> bytes:
        """Take from the head of the line what may go on in one write."""
        piece = self._line.popleft()
        allowances = (fault.allowance(self) for fault in faults)
        nbytes = min((a for a in allowances if a is not None), default=len(piece.data))
        self._taken = piece._replace(data=piece.data[:nbytes])
        if rest := piece.data[nbytes:]:
            self._line.appendleft(piece._replace(data=rest))
        self._line_bytes -= len(self._taken.data)
        if not self._is_full() and not self._has_ended():
            self._read_on()
        data = bytes(self._taken.data)
        for fault in faults:
            data = fault.change(self, data)
        return data

    def _send(self, faults: Sequence[Fault], now: float) -> bool:
        """Write what was taken; ``False`` if the sink takes nothing now."""
        try:
            sent = self._sink.send(self._unsent)
        except (BlockingIOError, InterruptedError):
            self._wait_until_writable()
            return False
        except OSError as exc:
            raise Cut(resets=True) from exc
        self._unsent = self._unsent[sent:]
        self._owner.count(self, sent, self._line_bytes)
        for fault in faults:
            fault.passed(self, sent, now)
        return True

    def _pass_end(self, piece: Piece) -> None:
        if piece.end == "reset":
            raise Cut(resets=True)
        self.shut()
        self.stop()
        self._owner.flow_is_over()

    def _is_full(self) -> bool:
        # Who sends byte by byte shall not fill the memory with small objects.
        return self._line_bytes >= MAX_LINE_BYTES or len(self._line) >= _MAX_PIECES

    def _has_ended(self) -> bool:
        return bool(self._line and self._line[-1].end)

    def _wait_until_writable(self) -> None:
        if not self._writes:
            self._writes = True
            self._loop.add_writer(self._sink, self._on_writable)

    def _on_writable(self) -> None:
        self._stop_writing()
        self.wake()

    def _stop_writing(self) -> None:
        if self._writes:
            self._writes = False
            self._loop.remove_writer(self._sink)
