"""What leaves a link: written in one place, and bounded where a peer decides.

Of what is queued in a tick the first request, or the first answer, leaves at once:
the other side can begin. All else leaves in one write at the tick's end. While more
than 4 MiB of answers wait for a peer, nothing more of it is read: one that
never reads cannot make us hold memory.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable
from typing import Final

from asynckv.links.streams import ControlStream
from asynckv.protocol.outbox import Outbox

__all__ = ("LOW_BYTES", "MAX_ANSWER_BYTES", "LinkWriter")

MAX_ANSWER_BYTES: Final = 4 * 2**20
LOW_BYTES: Final = 2**20
_MAX_STUCK_ANSWER_BYTES: Final = 4 * MAX_ANSWER_BYTES
_WRITE_BYTES: Final = 256 * 1024


class LinkWriter:
    """Moves an outbox to a stream, and pauses its reading where it must.

    Whoever handles what came sets ``will_flush`` meanwhile, flushes when more than
    ``max_answer_bytes`` wait, and calls :meth:`end_handling`.
    ``read_on()`` is called, on a later tick, when reading may go on: first with
    what was received already, then by ``resume_reading``.
    """

    def __init__(
        self,
        stream: ControlStream,
        outbox: Outbox,
        loop: asyncio.AbstractEventLoop,
        read_on: Callable[[], None],
    ) -> None:
        self.is_reading_paused = False
        self.will_flush = False
        self.max_answer_bytes = MAX_ANSWER_BYTES
        self._tell_to_read_on = read_on
        self._stream = stream
        self._outbox = outbox
        self._loop = loop
        self._is_last = False
        self._has_begun = False
        self._sent_before = 0
        self._when_drained: list[Callable[[], None]] = []
        self._when_answered: collections.deque[Callable[[], None]] = collections.deque()

    @property
    def nbytes(self) -> int:
        """Bytes that have not left for the kernel yet."""
        return self._outbox.nbytes + self._stream.unsent_bytes

    @property
    def may_write(self) -> bool:
        """Does nothing wait, and did nothing leave at once in this tick?"""
        is_idle = not (self._outbox.nbytes or self._stream.unsent_bytes)
        return is_idle and not (self._has_begun or self._is_last)

    def write_first(self, data: bytes) -> None:
        """As :meth:`flush_first`, of what was not queued; when :attr:`may_write`."""
        self._has_begun = True
        self._stream.write(data)
        if not self.will_flush:
            self.flush_soon()

    def flush_first(self) -> None:
        """Write what is queued at once, if nothing left so in this tick; else soon."""
        if not self._has_begun:
            self._has_begun = True
            self.flush()
        if not self.will_flush:
            self.flush_soon()

    def flush_soon(self) -> None:
        """Write what is queued at the end of this tick, or of what is handled."""
        if not self.will_flush:
            self.will_flush = True
            self._loop.call_soon(self._flush_now)

    def end_handling(self, *, is_answered: bool = False) -> None:
        """What came is handled: write the answers.

        If there are none, and none has left before, tasks that were woken may have
        something to say: it leaves behind them in the same tick.
        """
        self.will_flush = self._has_begun = False
        if self._outbox.nbytes or self.is_reading_paused or self._when_drained:
            self.flush()
        elif not (is_answered or self._is_last):
            self.will_flush = True
            self._loop.call_soon(self._flush_now)
        if self._when_answered:
            self._tell_answered()

    def call_when_answered(self, fn: Callable[[], None]) -> None:
        """Call ``fn`` once, behind the answers to what is handled now.

        Or behind what leaves at the end of this tick; otherwise on a later one.
        """
        if self.will_flush:
            self._when_answered.append(fn)
        else:
            self._loop.call_soon(fn)

    def flush(self) -> None:
        """Write what is queued, as much as the stream takes."""
        stream, outbox = self._stream, self._outbox
        while outbox.nbytes and not stream.unsent_bytes:
            stream.write(outbox.take(_WRITE_BYTES))
        if self._is_last:
            if not outbox.nbytes:
                stream.finish()
        elif outbox.answer_bytes > self.max_answer_bytes:
            self._pause()
        elif self.is_reading_paused and outbox.answer_bytes <= LOW_BYTES:
            self.max_answer_bytes = MAX_ANSWER_BYTES
            self._read_on()
        if self._when_drained and self.nbytes < LOW_BYTES:
            self.notify_drained()

    def finish(self) -> None:
        """Write what is queued, then end the writing half; read on meanwhile."""
        self._is_last = True
        self.is_reading_paused = False
        self._stream.resume_reading()
        self.flush()

    def stop(self) -> None:
        """Write nothing more."""
        self.is_reading_paused = False
        self._outbox.clear()

    def call_when_drained(self, fn: Callable[[], None]) -> None:
        """Call ``fn`` once less than 1 MiB waits; on a later tick if it is so now."""
        if self.nbytes < LOW_BYTES:
            self._loop.call_soon(fn)
        else:
            self._when_drained.append(fn)

    def notify_drained(self) -> None:
        """Wait no longer: everything has left, or nothing more will."""
        waiting, self._when_drained = self._when_drained, []
        for fn in waiting:
            self._loop.call_soon(fn)

    def judge_reader(self) -> bool:
        """Once a heartbeat: whether the peer takes what it is sent.

        While its bytes are not read, its silence means nothing. Where both
        sides wait for the other to read, one has to give way; for a peer that
        never reads that happens twice, and then never again.
        """
        sent, self._sent_before = self._sent_before, self._stream.sent_bytes
        if not self.is_reading_paused or sent != self._sent_before:
            return True
        if self.max_answer_bytes < _MAX_STUCK_ANSWER_BYTES:
            self.max_answer_bytes *= 2
            self._read_on()
        return False

    def _flush_now(self) -> None:
        self.will_flush = self._has_begun = False
        if self._outbox.nbytes or self.is_reading_paused or self._when_drained:
            self.flush()
        elif self._is_last:
            self.flush()
        if self._when_answered:
            self._tell_answered()

    def _tell_answered(self) -> None:
        while self._when_answered:
            self._when_answered.popleft()()

    def _pause(self) -> None:
        self.is_reading_paused = True
        self._stream.pause_reading()

    def _read_on(self) -> None:
        self.is_reading_paused = False
        self._loop.call_soon(self._tell_to_read_on)
