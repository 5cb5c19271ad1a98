"""The asking side of one hold on stored values."""

from __future__ import annotations

from asynckv.errors import LeaseLost, PeerLost
from asynckv.links.answers import Answer, fail_by
from asynckv.links.link import Link
from asynckv.protocol.frames import Cancel, Cancelled, Frame
from asynckv.protocol.pin_frames import Pin, Pinned

__all__ = ("Pinning",)


class Pinning:
    """Values that are kept at the other end of one link."""

    def __init__(self, link: Link, keys: tuple[str, ...]) -> None:
        self.found: Answer[tuple[bool, ...]] = Answer()
        self._is_over = False
        self._lost: PeerLost | None = None
        self._stream = link.open_stream(self, Pin(keys))

    def on_frame(self, frame: Frame, body: bytes) -> None:
        match frame:
            case Pinned():
                self.found.give(frame.flags)
            case Cancelled() if self._is_over:
                pass
            case _:
                fail_by(frame, "pin", self.found.fail)

    def on_lost(self, error: PeerLost) -> None:
        self._lost = error
        self.found.fail(error)

    def let_go(self) -> None:
        """The values may be dropped again. Never waits; again is nothing."""
        if not self._is_over and self._lost is None:
            self._stream.send(Cancel())
        self._is_over = True

    def check(self) -> None:
        """:raises LeaseLost: the link was lost, and the hold with it"""
        if self._lost is not None:
            raise LeaseLost("the link was lost, and what was pinned with it")
