"""Frames that wait to be sent, as whole wire frames. No I/O.

Order is kept within a stream. Between streams a frame never waits for more
than one part of another stream's long body.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

from asynckv.protocol.codec import (
    BODY_PART_BYTES,
    Buffer,
    encode_parts,
    encode_plain,
    max_unfinished_bytes,
)
from asynckv.protocol.frames import Frame
from asynckv.protocol.values import Limits
from asynckv.protocol.wire import parity_of

__all__ = ("Outbox",)


class _LongFrame:
    """A frame whose body goes part by part, and what follows on its stream."""

    __slots__ = (
        "after",
        "body_bytes",
        "followers",
        "is_over",
        "left_bytes",
        "others",
        "part",
    )

    def __init__(self, first: bytes, others: Iterator[bytes], body_bytes: int) -> None:
        self.after = 0
        self.part = first
        self.others = others
        self.is_over = False
        self.body_bytes = body_bytes
        self.left_bytes = len(first) + body_bytes - BODY_PART_BYTES
        self.followers: collections.deque[bytes | _LongFrame] = collections.deque()

    def take_part(self) -> tuple[bytes, int]:
        """Return the next wire frame, and how much less is left now."""
        part, before = self.part, self.left_bytes
        self.part = next(self.others, b"")
        self.is_over = not self.part
        # The headers of the parts are not counted: never 0 before the end.
        self.left_bytes = 0 if self.is_over else max(before - len(part), 1)
        return part, before - self.left_bytes


class Outbox:
    """What one side of a link still has to send.

    ``own_parity`` is that of the streams this side opens: what waits for the
    others, and for the link itself, counts as ``answer_bytes``, which a peer
    that never reads could make grow. ``behind_count`` frames stand behind all
    that is put while they wait.
    """

    def __init__(self, limits: Limits, *, own_parity: int) -> None:
        self.nbytes = 0
        self.answer_bytes = 0
        self.behind_count = 0
        self._limits = limits
        self._own_parity = own_parity
        self._urgent: collections.deque[bytes] = collections.deque()
        self._ready: collections.deque[bytes] = collections.deque()
        self._behind: collections.deque[bytes] = collections.deque()
        self._long: collections.OrderedDict[int, _LongFrame] = collections.OrderedDict()
        self._started: collections.deque[int] = collections.deque()
        self._waiting: collections.deque[int] = collections.deque()
        self._started_bytes = 0
        self._taken_count = 0
        self._last: bytes | None = None

    def __bool__(self) -> bool:
        return self.nbytes > 0

    def put(self, stream: int, frame: Frame, body: Buffer = b"") -> None:
        """Add a frame behind the others of its stream. ``body`` is not kept.

        :raises LocalProtocolError: it is longer than the link's limits
        """
        if type(body) is not bytes:
            body = bytes(body)
        if len(body) > BODY_PART_BYTES:
            self._put_long(stream, frame, body)
            return
        data = encode_plain(stream, frame, body, self._limits)
        nbytes = len(data)
        self.nbytes += nbytes
        if stream & 1 != self._own_parity:
            self.answer_bytes += nbytes
        if self._long:
            self._add(stream, data)
        else:
            self._ready.append(data)

    def put_behind(self, stream: int, frame: Frame) -> None:
        """Add the very last frame of a stream, behind all that is taken with it.

        So the peer comes first to what it is to answer.
        """
        data = encode_plain(stream, frame, b"", self._limits)
        self.nbytes += len(data)  # of a stream of this side: it is no answer
        if self._long:
            self._add(stream, data)
        else:
            self._behind.append(data)
            self.behind_count += 1

    def close_up(self) -> None:
        """Put nothing more before what stands behind."""
        self._ready.extend(self._behind)
        self._behind.clear()
        self.behind_count = 0

    def _put_long(self, stream: int, frame: Frame, body: bytes) -> None:
        first, others = encode_parts(stream, frame, body, self._limits)
        long = _LongFrame(first, others, len(body))
        self._count(stream, long.left_bytes)
        self._add(stream, long)

    def _add(self, stream: int, item: bytes | _LongFrame) -> None:
        if (before := self._long.get(stream)) is not None:
            before.followers.append(item)
        elif isinstance(item, bytes):
            self._ready.append(item)
        else:
            item.after = self._taken_count + len(self._ready)
            self._long[stream] = item
            self._waiting.append(stream)

    def put_first(self, frame: Frame) -> None:
        """Add a frame of the link itself, before all that waits."""
        data = encode_plain(0, frame, b"", self._limits)
        self._urgent.append(data)
        self._count(0, len(data))

    def put_last(self, frame: Frame) -> None:
        """Add the frame of the link itself that is sent after all others."""
        self._last = encode_plain(0, frame, b"", self._limits)
        self._count(0, len(self._last))

    def clear(self) -> None:
        """Drop everything. Only before the very last frame of a broken link."""
        self._urgent.clear()
        self._ready.clear()
        self._behind.clear()
        self.behind_count = 0
        self._long.clear()
        self._started.clear()
        self._waiting.clear()
        self._last = None
        self.nbytes = self.answer_bytes = self._started_bytes = 0

    def take(self, max_bytes: int) -> bytes:
        """Remove and return whole wire frames, or nothing if there are none.

        About ``max_bytes`` of them: at least one, and one part of a long body.
        """
        if self.behind_count:
            self.close_up()
        if not (self._urgent or self._long or self._last or self.nbytes > max_bytes):
            data = b"".join(self._ready)
            self._ready.clear()
            self.nbytes = self.answer_bytes = 0
            return data
        taken: list[bytes] = []
        while self._urgent:
            taken.append(self._urgent.popleft())
            self._count(0, -len(taken[-1]))
        nbytes = self._take_ready(taken, max_bytes)
        while (part := self._take_part()) is not None:
            taken.append(part)
            nbytes += len(part)
            if nbytes >= max_bytes or self._ready:
                break
        if self._last is not None and not self._ready and not self._long:
            taken.append(self._last)
            self._count(0, -len(self._last))
            self._last = None
        return b"".join(taken)

    def _count(self, stream: int, nbytes: int) -> None:
        self.nbytes += nbytes
        if not stream or stream & 1 != self._own_parity:
            self.answer_bytes += nbytes

    def _take_ready(self, taken: list[bytes], max_bytes: int) -> int:
        """Move frames from the front until there are ``max_bytes``: how many are."""
        ready, before, parity = self._ready, len(taken), self._own_parity
        nbytes = answer_bytes = 0
        while ready and nbytes < max_bytes:
            data = ready.popleft()
            taken.append(data)
            nbytes += len(data)
            if parity_of(data) != parity:
                answer_bytes += len(data)
        self._taken_count += len(taken) - before
        self.nbytes -= nbytes
        self.answer_bytes -= answer_bytes
        return nbytes

    def _take_part(self) -> bytes | None:
        self._start_waiting()
        if not self._started:
            return None
        stream = self._started[0]
        self._started.rotate(-1)
        long = self._long[stream]
        part, less_bytes = long.take_part()
        self._count(stream, -less_bytes)
        if long.is_over:
            self._finish(stream, long)
        return part

    def _start_waiting(self) -> None:
        while self._waiting:
            long = self._long[self._waiting[0]]
            total = self._started_bytes + long.body_bytes
            if self._started and total > max_unfinished_bytes(self._limits):
                return
            if self._taken_count < long.after:  # its own stream's may be among them
                return
            self._started_bytes += long.body_bytes
            self._started.append(self._waiting.popleft())

    def _finish(self, stream: int, long: _LongFrame) -> None:
        self._started.remove(stream)
        self._started_bytes -= long.body_bytes
        del self._long[stream]
        for item in long.followers:
            self._add(stream, item)
