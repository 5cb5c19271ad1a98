"""Every fault, and its method of that name, for whoever has a proxy to put it on.

Some shape the traffic: every byte arrives, but late, or bit by bit. Some end
connections, or one direction of them. Some lose bytes, or change them.
"""

from __future__ import annotations

import abc
import math
import random
import sys
import weakref
from collections.abc import Iterator
from typing import Final, TypeVar

from asynckv.testing.faults.fault import Cut, Direction, Fault, Flow, Kind, Piece

__all__ = (
    "BitFlip",
    "BlackHole",
    "CutAfter",
    "HalfClose",
    "Injectors",
    "Latency",
    "Rate",
    "Reset",
    "Stall",
    "TinySlices",
)


_WRITES_PER_S: Final = 100


class Latency(Fault):
    """Each byte arrives ``delay_s`` later, in order.

    At most 1 MiB a direction and connection is under way meanwhile.
    """

    def __init__(
        self, delay_s: float, *, direction: Direction = "both", kind: Kind = "both"
    ) -> None:
        super().__init__(direction=direction, kind=kind)
        if not delay_s >= 0:  # NaN is not
            raise ValueError(f"a latency of {delay_s} s")
        self._delay_s = delay_s

    def delay_s(self, flow: Flow, piece: Piece, now: float) -> float:
        return piece.arrived + self._delay_s - now

    def passed(self, flow: Flow, nbytes: int, now: float) -> None:
        super().passed(flow, nbytes, now)
        self.note(flow, acts=1, nbytes=nbytes)


class Rate(Fault):
    """As many bytes a second and direction, shared by all connections it concerns."""

    def __init__(
        self,
        bytes_per_s: float,
        *,
        direction: Direction = "both",
        kind: Kind = "both",
    ) -> None:
        super().__init__(direction=direction, kind=kind)
        if not 0 < bytes_per_s < math.inf:
            raise ValueError(f"a rate of {bytes_per_s} bytes a second")
        self._bytes_per_s = bytes_per_s
        self._free_at = {"to_listener": 0.0, "to_dialler": 0.0}

    def delay_s(self, flow: Flow, piece: Piece, now: float) -> float:
        return self._free_at[flow.direction] - now

    def allowance(self, flow: Flow) -> int:
        return max(1, int(self._bytes_per_s / _WRITES_PER_S))

    def passed(self, flow: Flow, nbytes: int, now: float) -> None:
        super().passed(flow, nbytes, now)
        self.note(flow, acts=1, nbytes=nbytes)
        free_at = max(now, self._free_at[flow.direction])
        self._free_at[flow.direction] = free_at + nbytes / self._bytes_per_s


class TinySlices(Fault):
    """At most ``slice_bytes`` go on in one write: no reader gets a whole frame."""

    def __init__(
        self,
        slice_bytes: int = 1,
        *,
        direction: Direction = "both",
        kind: Kind = "both",
    ) -> None:
        super().__init__(direction=direction, kind=kind)
        if slice_bytes < 1:
            raise ValueError(f"slices of {slice_bytes} bytes")
        self._slice_bytes = slice_bytes

    def allowance(self, flow: Flow) -> int:
        return self._slice_bytes

    def passed(self, flow: Flow, nbytes: int, now: float) -> None:
        super().passed(flow, nbytes, now)
        self.note(flow, acts=1, nbytes=nbytes)


class Stall(Fault):
    """Nothing goes on, and nothing is lost: all of it does when the stall ends.

    Soon nothing is read either, so that the sender's own buffers fill up.
    """

    def delay_s(self, flow: Flow, piece: Piece, now: float) -> float:
        if not self.passed_bytes(flow):
            self._passed[flow] = 1  # once a connection and direction
            self.note(flow, acts=1)
        return math.inf


class CutAfter(Fault):
    """A connection ends when ``nbytes`` have gone on, in one direction of it.

    It is closed, so that both ends see the end of the stream behind what has
    passed, or with ``resets`` reset; who sends on meets a reset in either case.
    ``times``: how many connections in all; ``None`` for every one.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        resets: bool = False,
        times: int | None = 1,
        direction: Direction = "both",
        kind: Kind = "both",
    ) -> None:
        super().__init__(direction=direction, kind=kind)
        if nbytes < 0:
            raise ValueError(f"a cut after {nbytes} bytes")
        self._cut_at = nbytes
        self._resets = resets
        self._left = math.inf if times is None else times

    def allowance(self, flow: Flow) -> int | None:
        if self._left <= 0:
            return None
        return max(1, self._cut_at - self.passed_bytes(flow))

    def change(self, flow: Flow, data: bytes) -> bytes:
        self._cut_if_due(flow)
        return data

    def passed(self, flow: Flow, nbytes: int, now: float) -> None:
        super().passed(flow, nbytes, now)
        self.note(flow, nbytes=nbytes)
        self._cut_if_due(flow)

    def _cut_if_due(self, flow: Flow) -> None:
        if self._left > 0 and self.passed_bytes(flow) >= self._cut_at:
            self._left -= 1
            self.note(flow, acts=1)
            raise Cut(resets=self._resets)


class Reset(Fault):
    """Every connection is reset, and each new one as soon as its kind is known.

    TCP's RST; a unix socket has none and is closed.
    """

    def judge(self, flow: Flow) -> None:
        self.note(flow, acts=1)
        raise Cut(resets=True)


class HalfClose(Fault):
    """The receiver sees the end of the stream; the other direction goes on.

    What the sender still sends is read and dropped. The end of the fault undoes
    nothing.
    """

    def judge(self, flow: Flow) -> None:
        if flow.shut():
            self.note(flow, acts=1)


_EVERY_BYTES: Final = 2**16


class BlackHole(Fault):
    """What is sent is acknowledged, and never arrives; nor does an end of it.

    So does a load balancer that has lost its table. When this ends, connections
    that have lost bytes are reset.
    """

    swallows = True

    def delay_s(self, flow: Flow, piece: Piece, now: float) -> float:
        return math.inf if piece.end else 0.0

    def change(self, flow: Flow, data: bytes) -> bytes:
        if data:
            flow.tear()
            self.note(flow, acts=1, nbytes=len(data))
        return b""


class BitFlip(Fault):
    """One bit is not what it was: of byte ``at`` of a connection, or at random.

    With ``seed``, the same bits of the same bytes, at gaps of about
    ``every_bytes``, as long as connections come in the same order. ``times``:
    how many in all; ``None`` for no bound.
    """

    def __init__(
        self,
        at: int | None = None,
        *,
        bit: int = 0,
        seed: int | None = None,
        every_bytes: int = _EVERY_BYTES,
        times: int | None = 1,
        direction: Direction = "both",
        kind: Kind = "both",
    ) -> None:
        super().__init__(direction=direction, kind=kind)
        if (at is None) == (seed is None):
            raise ValueError("a bit flip needs either at= or seed=")
        if not 0 <= bit < 8 or every_bytes < 1 or (at or 0) < 0:
            raise ValueError("no such bit, or byte")
        self._at, self._bit = at, bit
        self._seed, self._every_bytes = seed, every_bytes
        self._left = math.inf if times is None else times
        self._plans: weakref.WeakKeyDictionary[Flow, _Plan]
        self._plans = weakref.WeakKeyDictionary()

    def begin(self) -> None:
        self._plans.clear()
        super().begin()

    def change(self, flow: Flow, data: bytes) -> bytes:
        plan = self._plans.get(flow)
        if plan is None:
            plan = self._plans[flow] = _Plan(self._places(flow))
        changed, start = bytearray(data), self.passed_bytes(flow)
        while plan.place < start + len(data) and self._left > 0:
            changed[plan.place - start] ^= 1 << plan.bit
            plan.go_on()
            self._left -= 1
            self.note(flow, acts=1)
        self.note(flow, nbytes=len(data))
        return bytes(changed)

    def _places(self, flow: Flow) -> Iterator[tuple[int, int]]:
        if self._at is not None:
            yield self._at, self._bit
            return
        rng = random.Random(f"{self._seed} {flow.number} {flow.direction}")
        place = -1
        while True:
            place += rng.randint(1, 2 * self._every_bytes)
            yield place, rng.randrange(8)


class _Plan:
    """Where the next flip of one direction of one connection is."""

    def __init__(self, places: Iterator[tuple[int, int]]) -> None:
        self._places = places
        self.place = self.bit = 0
        self.go_on()

    def go_on(self) -> None:
        self.place, self.bit = next(self._places, (sys.maxsize, 0))


_F = TypeVar("_F", bound=Fault)


class Injectors(abc.ABC):
    """Makes faults: ``with proxy.latency(0.05): ...``, or ``begin()`` and ``end()``.

    Each is off until then. Several at a time are applied in the order in which
    they were made. ``direction`` and ``kind`` say what a fault concerns.
    """

    @abc.abstractmethod
    def add(self, fault: _F) -> _F:
        """Put ``fault`` between the two sides, behind the others, and return it."""

    def latency(
        self, delay_s: float, *, direction: Direction = "both", kind: Kind = "both"
    ) -> Latency:
        """Let each byte arrive ``delay_s`` later: a distant peer."""
        return self.add(Latency(delay_s, direction=direction, kind=kind))

    def rate(
        self, bytes_per_s: float, *, direction: Direction = "both", kind: Kind = "both"
    ) -> Rate:
        """Let as many bytes a second pass, each way: a thin line."""
        return self.add(Rate(bytes_per_s, direction=direction, kind=kind))

    def tiny_slices(
        self,
        slice_bytes: int = 1,
        *,
        direction: Direction = "both",
        kind: Kind = "both",
    ) -> TinySlices:
        """Write at most ``slice_bytes`` at a time: no reader gets a whole frame."""
        return self.add(TinySlices(slice_bytes, direction=direction, kind=kind))

    def stall(self, *, direction: Direction = "both", kind: Kind = "both") -> Stall:
        """Hold everything until the end: a partition that TCP survives."""
        return self.add(Stall(direction=direction, kind=kind))

    def black_hole(
        self, *, direction: Direction = "both", kind: Kind = "both"
    ) -> BlackHole:
        """Swallow everything: a load balancer that acknowledges for the dead."""
        return self.add(BlackHole(direction=direction, kind=kind))

    def reset(self, *, direction: Direction = "both", kind: Kind = "both") -> Reset:
        """Reset every connection, also new ones: a peer whose host restarts."""
        return self.add(Reset(direction=direction, kind=kind))

    def half_close(
        self, direction: Direction = "to_listener", *, kind: Kind = "both"
    ) -> HalfClose:
        """End one direction and leave the other: a peer that shut down half."""
        return self.add(HalfClose(direction=direction, kind=kind))

    def cut_after(
        self,
        nbytes: int,
        *,
        resets: bool = False,
        times: int | None = 1,
        direction: Direction = "both",
        kind: Kind = "both",
    ) -> CutAfter:
        """End a connection that has carried ``nbytes`` one way: a crash in a frame.

        ``resets``: by an RST. ``times``: how many connections; ``None``, every one.
        """
        return self.add(
            CutAfter(nbytes, resets=resets, times=times, direction=direction, kind=kind)
        )

    def bit_flip(
        self,
        at: int | None = None,
        *,
        bit: int = 0,
        seed: int | None = None,
        every_bytes: int = 2**16,
        times: int | None = 1,
        direction: Direction = "both",
        kind: Kind = "both",
    ) -> BitFlip:
        """Change a bit of byte ``at`` of a connection, or some at random: bad memory.

        ``seed``: which ones, at gaps of about ``every_bytes``. ``times``: how many
        in all; ``None`` for no bound.
        """
        return self.add(
            BitFlip(
                at,
                bit=bit,
                seed=seed,
                every_bytes=every_bytes,
                times=times,
                direction=direction,
                kind=kind,
            )
        )
