"""Small parts of a transfer: they leave with the frame that says that they are sent.

A part on a lane costs both sides a wake-up of a thread and a frame of its own. Parts
of at most :data:`EAGER_NBYTES` leave on the control connection instead, as many
together as fit in a frame's body. The rule is one of size alone, so that both sides
know by which route a part goes.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable
from typing import Final, TypeAlias

from asynckv.links.link import Link, LinkStream
from asynckv.protocol.codec import BODY_PART_BYTES
from asynckv.protocol.digests import digest_of
from asynckv.protocol.transfer_frames import MAX_RIDERS, Riders

__all__ = ("EAGER_NBYTES", "EagerParts", "is_eager")

EAGER_NBYTES: Final = 16 * 1024

_TICK_BYTES: Final = 256 * 1024
"""So much is digested and copied on the loop before others have their turn."""

_BUSY_BYTES: Final = 2**20

_Part: TypeAlias = tuple[int, int, Callable[[], memoryview], bytes | None]


def is_eager(nbytes: int) -> bool:
    """Does a part of this size go by frames, and not by a lane?"""
    return nbytes <= EAGER_NBYTES


class EagerParts:
    """The small parts of one transfer that have not left yet.

    Their memory is read on the loop, until :meth:`stop`.
    """

    def __init__(self, link: Link, stream: LinkStream, transfer: int) -> None:
        self._link = link
        self._stream = stream
        self._transfer = transfer
        self._loop = asyncio.get_running_loop()
        self._parts: collections.deque[_Part] = collections.deque()
        self._is_due = False

    def add(
        self,
        index: int,
        nbytes: int,
        read: Callable[[], memoryview],
        digest: bytes | None = None,
    ) -> None:
        """Let a part of so many bytes leave soon. They are read when it does.

        ``digest`` is its own where that is known already.
        """
        self._parts.append((index, nbytes, read, digest))
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._go)

    def stop(self) -> None:
        """Send no more of them: their memory is not read any more."""
        self._parts.clear()

    def _go(self) -> None:
        self._is_due = False
        left_bytes = _TICK_BYTES
        while self._parts and left_bytes > 0:
            left_bytes -= self._send_some()
        if not self._parts:
            return
        self._is_due = True
        if self._link.outgoing_bytes > _BUSY_BYTES:
            self._link.call_when_drained(self._go)
        else:
            self._loop.call_soon(self._go)

    def _send_some(self) -> int:
        """Send what fits in a frame; return how many bytes that were."""
        parts = self._parts
        numbers, digests, sources = list[int](), list[bytes](), list[memoryview]()
        is_digested = self._link.digest != "off"
        total = 0
        while parts and len(numbers) < MAX_RIDERS:
            index, nbytes, read, digest = parts[0]
            if total + nbytes > BODY_PART_BYTES:
                break
            parts.popleft()
            total += nbytes
            source = read()
            numbers.append(index)
            sources.append(source)
            if is_digested:
                digests.append(digest or digest_of(source))
        frame = Riders(self._transfer, tuple(numbers), tuple(digests))
        self._stream.send(frame, b"".join(sources))
        return total + 1
