"""Memory that lies in several places, read and written as if it were one.

Neighbours are one run: what lies in one place is a plain ``memoryview``. Many small
blocks of one size are copied in and out together, by one call for any number: to name
each of them to the kernel, to the digest and to Python costs more than to copy it once
within the cache.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final, TypeAlias

import numpy
import numpy.typing
from numpy.lib.stride_tricks import as_strided

__all__ = (
    "FEW_NBYTES",
    "Memory",
    "Runs",
    "SmallBlocks",
    "copied",
    "fill",
    "joined",
    "landed",
    "pieces_of",
    "put_at",
    "runs_at",
    "runs_in",
    "take_at",
)


FEW_NBYTES: Final = 8 * 1024
"""Longer runs are rather named one by one than copied (measured: there it is even)."""

_Bytes: TypeAlias = numpy.typing.NDArray[numpy.uint8]
_Places: TypeAlias = numpy.typing.NDArray[numpy.int64]


class SmallBlocks:
    """Blocks of ``nbytes`` that begin at ``starts`` of ``base``, as if they were one.

    Copying releases the GIL.
    """

    __slots__ = ("_nbytes", "_starts", "_windows")

    def __init__(
        self,
        base: memoryview,
        starts: _Places,
        nbytes: int,
    ) -> None:
        flat = numpy.frombuffer(base, numpy.uint8)
        # Whatever begins at a byte and is as long as a block.
        windows = (len(flat) - nbytes + 1, nbytes)
        self._windows: _Bytes = as_strided(flat, windows, (1, 1))
        self._starts = starts
        self._nbytes = nbytes

    def put(self, start: int, source: memoryview) -> None:
        """Copy ``source`` to where the bytes from ``start`` on lie."""
        given = numpy.frombuffer(source, numpy.uint8)
        for places, inner, span in self._spans(start, len(given)):
            rows = given[span].reshape(len(places), -1)
            self._windows[places, inner] = rows

    def take(self, start: int, target: memoryview) -> None:
        """Copy the bytes from ``start`` on to ``target``."""
        wanted = numpy.frombuffer(target, numpy.uint8)
        for places, inner, span in self._spans(start, len(wanted)):
            wanted[span] = self._windows[places, inner].reshape(-1)

    def _spans(self, start: int, length: int) -> Iterator[tuple[_Places, slice, slice]]:
        """Yield blocks, which bytes of each, and where these are among ``length``."""
        nbytes, stop, done = self._nbytes, start + length, 0
        while done < length:
            number, skipped = divmod(start + done, nbytes)
            whole = 0 if skipped else (length - done) // nbytes
            count = max(whole, 1)
            end = min((number + count) * nbytes, stop) - start
            inner = slice(skipped, skipped + (end - done) // count)
            yield self._starts[number : number + count], inner, slice(done, end)
            done = end


_Offsets: TypeAlias = Sequence[int] | numpy.typing.NDArray[numpy.int64]


class Runs:
    """Some of the bytes of ``base``, in an order of their own.

    Each run lies from its start to its stop in ``base``; ``ends`` are where runs
    end in the memory that they make up. Where most are short, ``small_blocks`` copies
    them together.
    """

    __slots__ = ("_base", "_ends", "_starts", "_stops", "nbytes", "small_blocks")

    def __init__(
        self,
        base: memoryview,
        starts: _Offsets,
        stops: _Offsets,
        ends: _Offsets,
        small_blocks: SmallBlocks | None = None,
    ) -> None:
        self.small_blocks = small_blocks
        self._base = base
        self._starts = starts
        self._stops = stops
        self._ends = ends
        self.nbytes = int(ends[-1]) if len(ends) else 0

    def memory(self) -> Runs:
        """Return where the bytes lie: itself."""
        return self

    def __len__(self) -> int:
        """How many runs there are."""
        return len(self._starts)

    def pieces(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes from ``start`` to ``stop``, a view for each run."""
        if start >= stop:
            return []
        base, ends = self._base, self._ends
        first = bisect.bisect_right(ends, start)
        last = bisect.bisect_left(ends, stop)
        places = zip(
            self._starts[first : last + 1], self._stops[first : last + 1], strict=True
        )
        found = [base[begin:end] for begin, end in places]
        if surplus := ends[last] - stop:
            found[-1] = found[-1][:-surplus]
        if skipped := start - (ends[first - 1] if first else 0):
            found[0] = found[0][skipped:]
        return found


Memory: TypeAlias = memoryview | Runs
"""Where payload comes from, or lands. Flat bytes."""

_NOTHING: Final = memoryview(b"")


def runs_in(
    base: memoryview, starts: numpy.typing.NDArray[numpy.int64], nbytes: int
) -> Memory:
    """Return the memory of runs of ``nbytes`` each that begin at ``starts``."""
    if not len(starts) or not nbytes:
        return base[:0]
    is_first = numpy.ones(len(starts), dtype=bool)
    numpy.not_equal(starts[1:], starts[:-1] + nbytes, out=is_first[1:])
    (first,) = is_first.nonzero()
    places = starts[first]
    if len(places) == 1:
        place = int(places[0])
        return base[place : place + len(starts) * nbytes]
    ends = numpy.append(first[1:], len(starts)) * nbytes
    stops = places + numpy.diff(ends, prepend=0)
    if len(starts) * nbytes < len(places) * FEW_NBYTES:
        # Lists would be made for nobody: they are hardly ever looked at.
        small_blocks = SmallBlocks(base, starts, nbytes)
        return Runs(base, places, stops, ends, small_blocks)
    return Runs(base, places.tolist(), stops.tolist(), ends.tolist())


def runs_at(base: memoryview, spans: Sequence[tuple[int, int]]) -> Memory:
    """Return the memory of runs that begin and end at these places."""
    if len(spans) < 2:
        return base[slice(*spans[0])] if spans else base[:0]
    starts = [start for start, _ in spans]
    stops = [stop for _, stop in spans]
    ends = list(accumulate(stop - start for start, stop in spans))
    return Runs(base, starts, stops, ends)


def copied(source: Memory, target: Memory, nbytes: int) -> Iterator[memoryview]:
    """Copy from the beginning, and yield what was copied in pieces of ``nbytes``.

    Releases the GIL while it copies. A piece in several places is several.
    """
    start = 0
    while start < source.nbytes:
        stop = min(start + nbytes, source.nbytes)
        blocks = source.small_blocks if isinstance(source, Runs) else None
        if blocks is not None and isinstance(target, memoryview):
            blocks.take(start, target[start:stop])
            yield target[start:stop]
        else:
            yield from _scattered(pieces_of(source, start, stop), target, start, stop)
        start = stop


def landed(pieces: Iterable[memoryview], target: Memory) -> Iterator[memoryview]:
    """Copy pieces in, one after the other, and yield where each is now.

    Releases the GIL while it copies.
    """
    start = 0
    for piece in pieces:
        stop = start + len(piece)
        yield from _scattered([piece], target, start, stop)
        start = stop


def fill(target: Memory, source: memoryview) -> None:
    """Copy a few bytes at once; the GIL is kept."""
    if isinstance(target, memoryview):
        target[:] = source
        return
    done = 0
    for place in target.pieces(0, target.nbytes):
        place[:] = source[done : done + len(place)]
        done += len(place)


def pieces_of(memory: Memory, start: int, stop: int) -> list[memoryview]:
    """Return the bytes from ``start`` to ``stop``, not copied."""
    if isinstance(memory, memoryview):
        return [memory[start:stop]]
    return memory.pieces(start, stop)


def take_at(source: Memory, start: int, target: memoryview) -> None:
    """Fill ``target`` with the bytes from ``start`` on. The GIL is released."""
    blocks = source.small_blocks if isinstance(source, Runs) else None
    if blocks is not None:
        blocks.take(start, target)
        return
    for _ in landed(pieces_of(source, start, start + len(target)), target):
        pass


def put_at(target: Memory, start: int, piece: memoryview) -> None:
    """Copy ``piece`` to where the bytes from ``start`` on lie. The GIL is released."""
    blocks = target.small_blocks if isinstance(target, Runs) else None
    if blocks is not None:
        blocks.put(start, piece)
        return
    for _ in _scattered([piece], target, start, start + len(piece)):
        pass


def joined(memory: Memory) -> memoryview:
    """Return the bytes in one place: a copy if they are in several."""
    if isinstance(memory, memoryview):
        return memory
    return memoryview(b"".join(memory.pieces(0, memory.nbytes)))


def _scattered(
    pieces: Iterable[memoryview], target: Memory, start: int, stop: int
) -> Iterator[memoryview]:
    rest, offset, origin = iter(pieces), 0, _NOTHING
    for place in pieces_of(target, start, stop):
        done = 0
        while done < len(place):
            if offset == len(origin):
                origin, offset = next(rest), 0
            some = min(len(place) - done, len(origin) - offset)
            numpy.copyto(
                numpy.frombuffer(place[done : done + some], numpy.uint8),
                numpy.frombuffer(origin[offset : offset + some], numpy.uint8),
            )
            done += some
            offset += some
        yield place
