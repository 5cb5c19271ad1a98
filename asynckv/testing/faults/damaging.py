"""Faults that lose bytes, or change them."""

from __future__ import annotations

import math
import random
import sys
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from asynckv.testing.faults.fault import Direction, Fault, Kind

if TYPE_CHECKING:
    from asynckv.testing.faults.flows import Flow, Piece

__all__ = ("BitFlip", "BlackHole")

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
