"""Every fault by its name, for whoever has a proxy to put it on."""

from __future__ import annotations

import abc
from typing import TypeVar

from asynckv.testing.faults.cutting import CutAfter, HalfClose, Reset
from asynckv.testing.faults.damaging import BitFlip, BlackHole
from asynckv.testing.faults.fault import Direction, Fault, Kind
from asynckv.testing.faults.shaping import Latency, Rate, Stall, TinySlices

__all__ = ("Injectors",)

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
