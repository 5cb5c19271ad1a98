"""Memory whose bytes come one piece after the other, and go when they were sent."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

__all__ = ("Feed",)


def _tell_nobody() -> None:
    pass


class Feed:
    """The bytes of one part: whoever brings them puts pieces in, a lane takes them out.

    There are ``nbytes`` of them; ``fed_bytes`` have come. Any thread may call this, and
    nothing here waits.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.fed_bytes = 0
        self._pieces: collections.deque[tuple[int, memoryview]] = collections.deque()
        self._lock = threading.Lock()
        self._notify: Callable[[], None] = _tell_nobody
        self._is_closed = False

    def put(self, piece: memoryview) -> None:
        """These are the next bytes; they are kept until they were left.

        :raises ValueError: they are more than there were to come
        """
        with self._lock:
            if self.fed_bytes + piece.nbytes > self.nbytes:
                raise ValueError(f"more than {self.nbytes} bytes")
            if not self._is_closed:
                self._pieces.append((self.fed_bytes, piece))
            self.fed_bytes += piece.nbytes
        self._notify()

    def call_when_fed(self, told: Callable[[], None]) -> None:
        """Call ``told``, in any thread, each time that bytes have come."""
        self._notify = told

    def pieces(self, start: int, stop: int) -> list[memoryview]:
        """Return bytes that have come and were not left yet, not copied."""
        with self._lock:
            return [
                piece[max(start - begin, 0) : stop - begin]
                for begin, piece in self._pieces
                if begin < stop and start < begin + piece.nbytes
            ]

    def discard(self, before: int) -> None:
        """Keep no piece that ends at ``before`` or earlier."""
        with self._lock:
            while self._pieces:
                begin, piece = self._pieces[0]
                if begin + piece.nbytes > before:
                    break
                self._pieces.popleft()

    def close(self) -> None:
        """Keep nothing, whatever comes."""
        with self._lock:
            self._is_closed = True
            self._pieces.clear()
        self._notify = _tell_nobody
