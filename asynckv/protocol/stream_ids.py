"""Which ids of a link's streams have been used: odd ones by who dialled. No I/O."""

from __future__ import annotations

from typing import Final

from asynckv.errors import LocalProtocolError

__all__ = ("MAX_STREAM", "StreamIds")

MAX_STREAM: Final = 2**32 - 1


class StreamIds:
    """The ids of one side and of its peer, each used once.

    Own ids grow by 2. Those of the peer do so about: a stream whose body is long
    may be passed by at most ``max_skipped`` later ones.
    """

    __slots__ = ("_max_skipped", "_skipped", "last_own", "last_theirs", "parity")

    def __init__(self, *, dialled: bool, max_skipped: int) -> None:
        self.parity = 1 if dialled else 0
        self.last_own = -1 if dialled else 0
        self.last_theirs = 0 if dialled else -1
        # Below the last: their frame is still coming, others have passed it.
        self._skipped: set[int] = set()
        self._max_skipped = max_skipped

    def next_own(self) -> int:
        """Return the id of the next own stream, which is not used by that yet.

        :raises LocalProtocolError: all are used up
        """
        stream = self.last_own + 2
        if stream > MAX_STREAM:
            raise LocalProtocolError("this link has used up its streams; reconnect")
        return stream

    def take_theirs(self, stream: int) -> bool:
        """Note that the peer has used ``stream``; ``False`` if it cannot."""
        if stream <= self.last_theirs:
            if stream not in self._skipped:
                return False
            self._skipped.remove(stream)
            return True
        skipped = range(self.last_theirs + 2, stream, 2)
        if len(skipped) + len(self._skipped) > self._max_skipped:
            return False
        self._skipped.update(skipped)
        self.last_theirs = stream
        return True

    def was_used(self, stream: int) -> bool:
        """Whether ``stream`` has ever been open, on either side."""
        if stream & 1 == self.parity:
            return stream <= self.last_own
        return stream <= self.last_theirs and stream not in self._skipped
