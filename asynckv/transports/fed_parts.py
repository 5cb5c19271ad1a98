"""A part that may leave as its bytes come."""

from __future__ import annotations

from collections.abc import Callable

from asynckv.tensors.feeds import Feed
from asynckv.transports.parts import DoneCallback, Part

__all__ = ("FedPart",)


class FedPart(Part):
    """A part whose memory is a feed: what was sent is kept no longer."""

    __slots__ = ("_feed",)

    def __init__(
        self,
        transfer: int,
        number: int,
        feed: Feed,
        done: DoneCallback,
        known_digest: bytes | None,
    ) -> None:
        super().__init__(transfer, number, memoryview(b""), done, known_digest)
        self._feed = feed

    @property
    def left_bytes(self) -> int:
        return self._feed.nbytes - self.moved_bytes

    @property
    def ready_bytes(self) -> int:
        return self._feed.fed_bytes - self.moved_bytes

    def call_when_ready(self, told: Callable[[], None]) -> None:
        self._feed.call_when_fed(told)

    def pieces(self, start: int, stop: int) -> list[memoryview]:
        return self._feed.pieces(start, stop)

    def move(self, nbytes: int) -> None:
        super().move(nbytes)
        self._feed.leave(self.moved_bytes)

    def let_go(self) -> None:
        super().let_go()
        self._feed.close()
