"""Tiers: what a tiered store keeps values in below its memory. They may fail."""

from __future__ import annotations

import abc
import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import ClassVar

from asynckv.abc.closing import Closable

__all__ = (
    "StoreTier",
    "TierFacts",
    "TierMemory",
    "TierPrefix",
    "TierResult",
    "TierValue",
    "WantedValue",
)


class TierResult(enum.Enum):
    """What became of one item of a call."""

    DONE = "done"
    """It was found and read, or is written, or is certainly gone."""
    MISSING = "missing"
    """The tier does not have it."""
    REFUSED = "refused"
    """The tier, or the store, had no room or no use for it, or a part of the tier is
    away: it is asked for others all the same.
    """
    FAILED = "failed"
    """Nobody knows: an error, or no answer."""


@dataclasses.dataclass(frozen=True)
class TierFacts:
    """What a tier says of itself when it is opened.

    ``is_local``: what it has, only this process can take away, and ``contains`` is
    answered from memory. ``patience_s``: so long a call may go on without moving a byte
    before it is given up, beside the time that its bytes take.
    """

    is_local: bool = False
    max_value_nbytes: int | None = None
    patience_s: float = 1.0


@dataclasses.dataclass(frozen=True)
class TierMemory:
    """Where the bytes of one value are, or are to go: ``pieces``, in this order.

    Their lengths add up to ``nbytes``. ``pages`` are the same memory where each piece
    begins at a page, and the last one goes on to the end of its own, which may be
    written to and is nobody else's; none, where the memory is not like that.
    """

    nbytes: int
    pieces: Sequence[memoryview]
    pages: Sequence[memoryview] = ()


@dataclasses.dataclass(slots=True, eq=False)
class TierValue:
    """A value that is to be written: ``header``, then the bytes of ``memory``.

    A tier adds to ``moved_nbytes`` as bytes leave, from any thread: whoever moves
    bytes is not given up. ``expires_at_s`` is when the value is void, by ``time.time``:
    a tier may drop it then, and need not.
    """

    key: str
    header: bytes
    memory: TierMemory
    expires_at_s: float | None = None
    moved_nbytes: int = 0
    is_held: ClassVar[bool] = False

    @property
    def lent_nbytes(self) -> int:
        """Memory that the tier may read until its call has ended."""
        return self.memory.nbytes

    @property
    def nbytes(self) -> int:
        """Of header and memory together."""
        return len(self.header) + self.memory.nbytes


@dataclasses.dataclass(slots=True, eq=False)
class TierPrefix:
    """All keys that begin with ``prefix``, which ends with ``/``, are to be deleted.

    A tier adds to ``moved_nbytes``, if only 1, whenever it has got on: whoever gets on
    is not given up, be it ever so much.
    """

    prefix: str
    moved_nbytes: int = 0
    is_held: ClassVar[bool] = False
    lent_nbytes: ClassVar[int] = 0


class WantedValue(abc.ABC):
    """A value that is to be read. ``moved_nbytes`` is as in :class:`TierValue`.

    A tier that hears how long the value is before it has read its header says so by
    ``coming_nbytes``: it is given the time for that, and what it reads is charged.
    """

    __slots__ = ("coming_nbytes", "header_nbytes", "key", "moved_nbytes")

    def __init__(self, key: str) -> None:
        self.key = key
        self.coming_nbytes = 0
        self.header_nbytes = 0
        self.moved_nbytes = 0

    @property
    @abc.abstractmethod
    def is_held(self) -> bool:
        """Does it wait for the store, not for the tier?"""

    @property
    @abc.abstractmethod
    def lent_nbytes(self) -> int:
        """Memory that the tier may write to until its call has ended.

        Before there is any, ``coming_nbytes``.
        """

    @abc.abstractmethod
    async def place(self, header: bytes | memoryview) -> TierMemory | None:
        """Return where what follows the header goes; ``None``: it is not wanted.

        ``header`` is what the value begins with, and may be longer than its header:
        ``header_nbytes`` says afterwards how long that is. Awaited on the loop, for
        there may have to be room first; the tier then writes all of the memory, and
        never after its call has returned. A tier that finds another value in place of
        the one it has begun to read asks anew, and writes no more to the memory of
        before. A cancelled call leaves no trace.

        :raises ValueError: this is shorter than the header; ask again with
            ``header_nbytes``, if the value has so many
        """


class StoreTier(Closable):
    """An engine that keeps values: a disk, a server, a bucket. What a backend writes.

    Every call is on the loop that has opened the tier, and takes as many items as its
    caller has; one result an item, in order. No call raises what the engine does: that
    is a :attr:`TierResult.FAILED`. A call ends when nothing touches the memory of its
    items any more, however long that takes: whoever has no time goes on without it, and
    keeps the memory until then. So a call is never cancelled, and needs no deadline.

    What is written is read back whole, or not at all: of a value that is written while
    another of its key is read, or while the process dies, either is found, or none.
    """

    @abc.abstractmethod
    async def probe(self) -> TierFacts:
        """Open the tier, or see if it is there again; say what it is like.

        :raises ConfigError: it cannot be used as it was configured
        :raises OSError: it is not there now
        """

    @abc.abstractmethod
    async def contains(self, keys: Sequence[str]) -> Sequence[TierResult]:
        """Say which of ``keys`` it has: ``DONE`` or ``MISSING``. No use of them.

        They may be those of a prefix, in order. ``FAILED``: that is not known, as where
        to ask for each would take too long.
        """

    @abc.abstractmethod
    async def fetch(self, wanted: Sequence[WantedValue]) -> Sequence[TierResult]:
        """Read values to where :meth:`WantedValue.place` says."""

    @abc.abstractmethod
    async def store(self, values: Sequence[TierValue]) -> Sequence[TierResult]:
        """Write values, each in place of what its key had."""

    @abc.abstractmethod
    async def delete(self, keys: Sequence[str]) -> Sequence[TierResult]:
        """Forget ``keys``; ``DONE``: it is certain that the key has nothing now.

        ``REFUSED``: not yet; it is asked again in a second or so.
        """

    async def clear(self, prefix: TierPrefix) -> TierResult:
        """Forget all keys that begin so; ``DONE``: nothing of before is there now.

        Nobody stores such a key meanwhile, but by calls that were given up before and
        have not ended: what those write may stay. ``REFUSED``, as here: it cannot, and
        is not asked again. Then the store that asks gets nothing of before there, for
        as long as it is open, though its ``contains`` counts it; any other one does,
        until the tier drops it.
        """
        return TierResult.REFUSED

    async def touch(self, keys: Sequence[str]) -> None:
        """These are in use: they should not be the next to go. May do nothing."""

    def counts(self) -> Mapping[str, float]:
        """Return numbers of the engine's own, by name, for metrics. Never waits.

        A name has small letters and ``_``, and no ending such as ``_total``.
        """
        return {}
