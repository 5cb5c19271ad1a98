"""The parts that a socket transport moves, and which of them the peer may send.

A part may leave as its bytes come. Lane threads and the loop share these; every change
is made under a lock, and nothing is waited for.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Final, Generic, TypeAlias, TypeVar

from asynckv.errors import LocalProtocolError, RemoteProtocolError
from asynckv.protocol.wire import Chunk, Digester
from asynckv.tensors.feeds import Feed
from asynckv.tensors.runs import Memory, SmallBlocks, pieces_of
from asynckv.waits.waiting import Waits

__all__ = (
    "Completions",
    "DoneCallback",
    "FedPart",
    "Part",
    "PartTable",
    "PendingParts",
    "TransferPart",
    "call_on",
)


logger = logging.getLogger(__name__)

_NOTHING: Final[Memory] = memoryview(b"")

DoneCallback: TypeAlias = Callable[[bytes, BaseException | None], None]


class TransferPart:
    """One tensor on its way: how much of it has moved, and whom to tell."""

    __slots__ = ("_done", "moved_bytes", "number", "stopped", "transfer")

    def __init__(self, transfer: int, number: int, done: DoneCallback) -> None:
        self.transfer = transfer
        self.number = number
        self.moved_bytes = 0
        self.stopped = False
        self._done = done

    def digest(self) -> bytes:
        """Return that of all its bytes, once they have moved; empty without one."""
        return b""

    def release(self) -> None:
        """Keep the memory alive no longer, nor whoever moved it."""

    def complete(self, error: BaseException | None = None) -> None:
        """Call ``done``, unless the part was stopped. On the loop, once.

        Nobody touches its memory any more, which is let go in any case.
        """
        if self.stopped:
            self.release()  # stopped after its last byte: no thread has done so
            return
        self.stopped = True
        digest = self.digest() if error is None else b""
        self.release()
        try:
            self._done(digest, error)
        except Exception:  # of whoever waits for this part: the others still hear
            logger.exception("a payload's completion callback failed")


class Part(TransferPart):
    """One tensor in memory of the host."""

    __slots__ = ("_digester", "carrier", "known_digest", "memory", "nbytes")

    def __init__(
        self,
        transfer: int,
        number: int,
        memory: Memory,
        done: DoneCallback,
        known_digest: bytes | None,
    ) -> None:
        super().__init__(transfer, number, done)
        self.memory = memory
        self.nbytes = memory.nbytes
        self.carrier: object | None = None
        self.known_digest = known_digest
        self._digester = Digester() if known_digest is None else None

    @property
    def left_bytes(self) -> int:
        """Bytes that have not moved yet."""
        return self.nbytes - self.moved_bytes

    @property
    def ready_bytes(self) -> int:
        """Bytes that could move now."""
        return self.left_bytes

    def call_when_ready(self, told: Callable[[], None]) -> None:
        """Call ``told``, in any thread, each time that more are ready than before."""

    @property
    def small_blocks(self) -> SmallBlocks | None:
        """What copies its memory, if that is many small blocks."""
        memory = self.memory
        return None if isinstance(memory, memoryview) else memory.small_blocks

    @property
    def is_digested(self) -> bool:
        """Whether its bytes are read once more as they move."""
        return self._digester is not None

    def pieces(self, start: int, stop: int) -> list[memoryview]:
        """Return these bytes: several pieces where the memory is in several places."""
        return pieces_of(self.memory, start, stop)

    def add_to_digest(self, pieces: Iterable[memoryview]) -> None:
        """Digest the next bytes, unless the digest is known or not wanted."""
        if (digester := self._digester) is not None:
            for piece in pieces:
                digester.update(piece)

    def digest(self) -> bytes:
        known = self.known_digest or b""
        return known if self._digester is None else self._digester.digest()

    def move(self, nbytes: int) -> None:
        """So many more bytes have moved."""
        self.moved_bytes += nbytes

    def release(self) -> None:
        self.memory = _NOTHING
        self.carrier = None


@dataclasses.dataclass(slots=True)
class _Incoming:
    """The parts of one transfer; ``None`` stands for one that has landed."""

    parts: dict[int, Part | None]
    missing: int


class PartTable:
    """Which memory waits for which part, and which thread writes to it.

    A chunk of a transfer that is not here was stopped or has landed, if its
    number is not above the highest ever announced; else the peer lies.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._transfers: dict[int, _Incoming] = {}
        self._in_use: dict[object, Part] = {}
        self._highest = -1

    @property
    def is_waiting(self) -> bool:
        """Some part has not landed yet."""
        return bool(self._transfers)

    def announce(self, transfer: int) -> None:
        """The peer may send chunks of transfers up to this one."""
        with self._lock:
            self._highest = max(self._highest, transfer)

    def add(self, part: Part) -> None:
        """Let the peer send this part.

        :raises LocalProtocolError: it is waited for already, or has landed
        """
        with self._lock:
            self._highest = max(self._highest, part.transfer)
            incoming = self._transfers.setdefault(part.transfer, _Incoming({}, 0))
            if part.number in incoming.parts:
                raise LocalProtocolError(
                    f"part {part.number} of transfer {part.transfer} received twice"
                )
            incoming.parts[part.number] = part
            incoming.missing += 1

    def stop(self, transfer: int) -> None:
        """Wait for no part of this transfer any more."""
        with self._lock:
            incoming = self._transfers.pop(transfer, None)
            for part in incoming.parts.values() if incoming else ():
                if part is not None:
                    part.stopped = True

    def landed_bytes(self, transfer: int) -> int:
        """Bytes that have landed of parts that are not whole yet."""
        with self._lock:
            incoming = self._transfers.get(transfer)
            parts = incoming.parts.values() if incoming else ()
            return sum(part.moved_bytes for part in parts if part is not None)

    def carriers_of(self, transfer: int | None = None) -> list[object]:
        """Who is between :meth:`enter` and :meth:`leave`, for one transfer or any."""
        with self._lock:
            return [
                carrier
                for carrier, part in self._in_use.items()
                if transfer is None or part.transfer == transfer
            ]

    def clear(self) -> None:
        """Wait for no part any more."""
        with self._lock:
            self._transfers.clear()

    def enter(self, chunk: Chunk, carrier: object) -> Part | None:
        """Begin to receive ``chunk``: its part, or ``None`` if nobody wants it.

        :raises RemoteProtocolError: the chunk is not what may come next
        """
        with self._lock:
            incoming = self._transfers.get(chunk.transfer)
            if incoming is None:
                if chunk.transfer > self._highest:
                    raise RemoteProtocolError(
                        f"a chunk of transfer {chunk.transfer}, never announced"
                    )
                return None
            part = incoming.parts.get(chunk.part)
            if part is None:
                raise RemoteProtocolError(
                    f"a chunk of part {chunk.part} of transfer {chunk.transfer}, "
                    "which has landed or does not exist"
                )
            _check_place(part, chunk, carrier)
            part.carrier = carrier
            self._in_use[carrier] = part
            return part

    def leave(self, part: Part, carrier: object) -> bool:
        """End what :meth:`enter` began; ``True`` if the part has landed now."""
        with self._lock:
            del self._in_use[carrier]
            incoming = self._transfers.get(part.transfer)
            if part.stopped or part.left_bytes or incoming is None:
                return False
            incoming.parts[part.number] = None
            incoming.missing -= 1
            if not incoming.missing:
                del self._transfers[part.transfer]
            return True


def _check_place(part: Part, chunk: Chunk, carrier: object) -> None:
    where = f"part {part.number} of transfer {part.transfer}"
    if part.carrier is not None and part.carrier is not carrier:
        raise RemoteProtocolError(f"{where} came on two lanes")
    if chunk.offset != part.moved_bytes:
        raise RemoteProtocolError(
            f"{where}: a chunk at {chunk.offset}, expected at {part.moved_bytes}"
        )
    if chunk.nbytes > part.left_bytes:
        raise RemoteProtocolError(
            f"{where}: a chunk of {chunk.nbytes} bytes, {part.left_bytes} are missing"
        )


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
        super().__init__(transfer, number, _NOTHING, done, known_digest)
        self.nbytes = feed.nbytes
        self._feed = feed

    @property
    def ready_bytes(self) -> int:
        return self._feed.fed_bytes - self.moved_bytes

    def call_when_ready(self, told: Callable[[], None]) -> None:
        self._feed.call_when_fed(told)

    def pieces(self, start: int, stop: int) -> list[memoryview]:
        return self._feed.pieces(start, stop)

    def move(self, nbytes: int) -> None:
        super().move(nbytes)
        self._feed.discard(self.moved_bytes)

    def release(self) -> None:
        super().release()
        self._feed.close()


P = TypeVar("P", bound=TransferPart)


class PendingParts(Generic[P]):
    """Parts by transfer, from the call until somebody is told. On the loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._parts: dict[int, set[P]] = {}
        self._waits = Waits(loop)

    def __bool__(self) -> bool:
        return bool(self._parts)

    def __contains__(self, part: P) -> bool:
        return part in self._parts.get(part.transfer, ())

    def add(self, part: P) -> None:
        """Somebody waits to be told of ``part``."""
        self._parts.setdefault(part.transfer, set()).add(part)

    def complete(self, part: P) -> None:
        """Tell of a part that has moved, if anybody still waits for it."""
        parts = self._parts.get(part.transfer)
        if parts is not None:
            parts.discard(part)
            if not parts:
                del self._parts[part.transfer]
        part.complete()
        self._waits.settle()

    def stop(self, transfer: int) -> set[P]:
        """Return the parts of this transfer: nobody waits for them any more."""
        parts = self._parts.pop(transfer, set())
        for part in parts:
            part.stopped = True
        self._waits.settle()
        return parts

    def take_all(self) -> list[P]:
        """Forget and return every part."""
        parts = [part for parts in self._parts.values() for part in parts]
        self._parts.clear()
        self._waits.settle()
        return parts

    async def wait_until_none(self, timeout_s: float) -> None:
        """Wait until there is none left, for ``timeout_s`` at most. Shielded."""
        await self._waits.wait(lambda: not self._parts, timeout_s=timeout_s)


def call_on(
    loop: asyncio.AbstractEventLoop, fn: Callable[..., None], *args: object
) -> None:
    """Let ``loop`` call ``fn`` soon; from any thread. Not if it is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(fn, *args)


_PARTS_A_TICK: Final = 64
"""The loop is given back to others after as many callbacks."""


class Completions:
    """One wake-up of the loop for all parts that were finished meanwhile."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Part], None]
    ) -> None:
        self._loop = loop
        self._deliver = deliver
        self._lock = threading.Lock()
        self._parts: collections.deque[Part] = collections.deque()

    def add(self, part: Part) -> None:
        """Let the loop deliver ``part`` soon. From any thread; never waits."""
        with self._lock:
            self._parts.append(part)
            is_first = len(self._parts) == 1
        if is_first:
            call_on(self._loop, self._deliver_some)

    def deliver_all(self) -> None:
        """Deliver what there is, on the loop, at once."""
        while self._parts:
            self._deliver(self._parts.popleft())

    def _deliver_some(self) -> None:
        for _ in range(_PARTS_A_TICK):
            if not self._parts:
                return
            self._deliver(self._parts.popleft())
        self._loop.call_soon(self._deliver_some)
