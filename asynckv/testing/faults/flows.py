"""One direction of one connection through a proxy.

Plain functions that the event loop calls: nothing here is a task, so nothing
has to be cancelled. What has arrived stands in a line of bounded length; while
that is full nothing is read, so that the sender feels a receiver who is slow.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import math
import socket
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, Protocol

from asynckv.testing.faults.fault import Cut, Fault
from asynckv.testing.faults.greetings import Greeting

__all__ = ("MAX_LINE_BYTES", "Flow", "FlowOwner", "Piece")

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
