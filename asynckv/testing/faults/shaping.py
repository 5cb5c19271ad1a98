"""Faults of a network that is slow: every byte arrives, but late, or bit by bit."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from asynckv.testing.faults.fault import Direction, Fault, Kind

if TYPE_CHECKING:
    from asynckv.testing.faults.flows import Flow, Piece

__all__ = ("Latency", "Rate", "Stall", "TinySlices")

_WRITES_PER_S: Final = 100


class Latency(Fault):
    """Each byte arrives ``delay_s`` later, in order.

    At most 1 MiB a direction and connection is under way meanwhile.
    """

    def __init__(
        self, delay_s: float, *, direction: Direction = "both", kind: Kind = "both"
    ) -> None:
        super().__init__(direction=direction, kind=kind)
        if delay_s < 0:
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
        if bytes_per_s <= 0:
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
