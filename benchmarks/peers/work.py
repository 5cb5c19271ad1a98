"""What every contender moves, and the memory that it comes from and lands in."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import numpy
import numpy.typing

__all__ = ("QUICK", "REQUEST_NBYTES", "WORKS", "Piece", "Pool", "Work", "WrongBytes")

Bytes: TypeAlias = numpy.typing.NDArray[numpy.uint8]

_KIB, _MIB = 2**10, 2**20
_POISON: Final = 255
_ODD: Final = numpy.uint64(0x9E3779B97F4A7C15)
_FIELDS: Final = 4
REQUEST_NBYTES: Final = 8 * _FIELDS


class WrongBytes(Exception):
    """What landed is not what was sent."""


@dataclasses.dataclass(frozen=True)
class Work:
    """``parts`` of ``nbytes`` that begin ``stride`` bytes apart in both pools.

    A turn pulls them ``repeats`` times; the turn's value is the median.
    """

    name: str
    title: str
    parts: int
    nbytes: int
    stride: int
    repeats: int = 1

    @property
    def total(self) -> int:
        """Bytes that one pull moves."""
        return self.parts * self.nbytes

    @property
    def span(self) -> int:
        """Bytes of a pool that it reaches over."""
        return self.parts * self.stride

    def encode(self) -> bytes:
        """Return the request that a source understands by :meth:`decode`."""
        fields = (self.parts, self.nbytes, self.stride, 0)
        return numpy.array(fields, "<u8").tobytes()

    @classmethod
    def decode(cls, request: bytes | bytearray | memoryview) -> Work:
        """Return what is asked for. Its name is empty."""
        parts, nbytes, stride, _ = numpy.frombuffer(request, "<u8", _FIELDS).tolist()
        return cls("", "", parts, nbytes, stride)


@dataclasses.dataclass(frozen=True)
class Piece:
    """What goes into one message: some whole parts, or a stretch of one."""

    rows: Bytes

    @property
    def nbytes(self) -> int:
        """Bytes in the message."""
        return self.rows.nbytes

    def gather(self) -> Bytes:
        """Return the message: the pool's own memory if that is in one, else a copy."""
        return numpy.ascontiguousarray(self.rows).reshape(-1)

    def scatter(self, message: bytes | memoryview | Bytes) -> None:
        """Put a message where it belongs."""
        array = numpy.frombuffer(message, numpy.uint8)
        numpy.copyto(self.rows, array.reshape(self.rows.shape))

    def landing(self) -> Bytes:
        """Return memory to receive into; then call :meth:`land` with it."""
        if len(self.rows) == 1:
            return self.rows.reshape(-1)
        return numpy.empty(self.nbytes, numpy.uint8)

    def land(self, landing: Bytes) -> None:
        """Put what was received where it belongs, unless it is there."""
        if len(self.rows) > 1:
            self.scatter(landing)


class Pool:
    """One block of touched memory that the parts of every work lie in.

    The sources of all processes hold the same bytes, no two words of them alike.
    """

    def __init__(self, nbytes: int) -> None:
        self.array: Bytes = numpy.zeros(nbytes, numpy.uint8)

    @classmethod
    def source(cls, works: Sequence[Work]) -> Pool:
        """Return a pool with the bytes to send. Takes seconds for a GiB."""
        pool = cls.target(works)
        words = pool.array.view(numpy.uint64)
        words[:] = numpy.arange(1, len(words) + 1, dtype=numpy.uint64)
        words *= _ODD
        return pool

    @classmethod
    def target(cls, works: Sequence[Work]) -> Pool:
        """Return a pool to receive into, touched."""
        pool = cls(-(-max(work.span for work in works) // 8) * 8)
        pool.poison()
        return pool

    @property
    def address(self) -> int:
        """Where it begins, for those that register memory."""
        return int(self.array.ctypes.data)

    def rows(self, work: Work) -> Bytes:
        """Return the parts as the rows of a view."""
        rows = self.array[: work.span].reshape(work.parts, work.stride)
        return rows[:, : work.nbytes]

    def views(self, work: Work) -> list[memoryview]:
        """Return each part's memory."""
        return [memoryview(row) for row in self.rows(work)]

    def pieces(self, work: Work, most: int) -> Iterator[Piece]:
        """Cut the work into messages of at most ``most`` bytes."""
        rows = self.rows(work)
        together = max(1, most // work.nbytes)
        for first in range(0, work.parts, together):
            some = rows[first : first + together]
            for begin in range(0, work.nbytes, max(most, 1)):
                yield Piece(some[:, begin : begin + most])

    def poison(self) -> None:
        """Fill it with what no part holds."""
        self.array.fill(_POISON)

    def check(self, work: Work, source: Pool) -> None:
        """Compare every byte of every part with the source's.

        :raises WrongBytes: they differ
        """
        pairs = zip(self.rows(work), source.rows(work), strict=True)
        for index, (row, sent) in enumerate(pairs):
            if not numpy.array_equal(row, sent):
                raise WrongBytes(f"{work.name}: wrong bytes in part {index}")


PING_NBYTES: Final = 64
WORKS: Final = (
    Work("layers", "1 GiB as 64 layers of 16 MiB", 64, 16 * _MIB, 16 * _MIB),
    Work("once", "64 MiB at once", 1, 64 * _MIB, 64 * _MIB, 8),
    Work("blocks", "10,000 blocks of 4 KiB", 10_000, 4 * _KIB, 8 * _KIB, 4),
    Work("ping", "64 bytes, round trip", 1, PING_NBYTES, PING_NBYTES, 300),
)
QUICK: Final = (
    Work("layers", "1 MiB as 4 layers of 256 KiB", 4, 256 * _KIB, 256 * _KIB),
    Work("once", "1 MiB at once", 1, _MIB, _MIB, 2),
    Work("blocks", "100 blocks of 4 KiB", 100, 4 * _KIB, 8 * _KIB, 2),
    Work("ping", "64 bytes, round trip", 1, PING_NBYTES, PING_NBYTES, 5),
)
"""Shows that everything works; its figures say nothing."""
