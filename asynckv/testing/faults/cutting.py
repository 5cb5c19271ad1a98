"""Faults that end connections, or one direction of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from asynckv.testing.faults.fault import Cut, Direction, Fault, Kind

if TYPE_CHECKING:
    from asynckv.testing.faults.flows import Flow

__all__ = ("CutAfter", "HalfClose", "Reset")


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
