"""Memory that lies in several places, read and written as if it were one.

Neighbours are one run: what lies in one place is a plain ``memoryview``.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy
import numpy.typing

__all__ = ("Memory", "Runs", "copied", "fill", "joined", "pieces_of", "runs_in")


class Runs:
    """Some of the bytes of ``base``, in an order of their own.

    ``starts`` are the places in ``base`` where runs begin, ``ends`` where they end
    in the memory that they make up.
    """

    __slots__ = ("_base", "_ends", "_starts", "nbytes")

    def __init__(
        self, base: memoryview, starts: Sequence[int], ends: Sequence[int]
    ) -> None:
        self._base = base
        self._starts = starts
        self._ends = ends
        self.nbytes = ends[-1] if ends else 0

    def __len__(self) -> int:
        """How many runs there are."""
        return len(self._starts)

    def pieces(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes from ``start`` to ``stop``, a view for each run."""
        base, starts, ends = self._base, self._starts, self._ends
        found = []
        index = bisect.bisect_right(ends, start)
        while start < stop:
            end = ends[index]
            place = starts[index] + start - (ends[index - 1] if index else 0)
            nbytes = min(end, stop) - start
            found.append(base[place : place + nbytes])
            start += nbytes
            index += 1
        return found


Memory: TypeAlias = memoryview | Runs
"""Where payload comes from, or lands. Flat bytes."""


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
    return Runs(base, places.tolist(), ends.tolist())


def copied(source: Memory, target: Memory, nbytes: int) -> Iterator[memoryview]:
    """Copy from the beginning, and yield what was copied in pieces of ``nbytes``.

    Releases the GIL while it copies. A piece in several places is several.
    """
    for start in range(0, source.nbytes, nbytes):
        stop = min(start + nbytes, source.nbytes)
        rest, offset = iter(pieces_of(source, start, stop)), 0
        origin = next(rest)
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


def fill(target: Memory, source: memoryview) -> None:
    """Copy a few bytes at once; the GIL is kept."""
    done = 0
    for place in pieces_of(target, 0, target.nbytes):
        place[:] = source[done : done + len(place)]
        done += len(place)


def pieces_of(memory: Memory, start: int, stop: int) -> list[memoryview]:
    """Return the bytes from ``start`` to ``stop``, not copied."""
    if isinstance(memory, Runs):
        return memory.pieces(start, stop)
    return [memory[start:stop]]


def joined(memory: Memory) -> memoryview:
    """Return the bytes in one place: a copy if they are in several."""
    if isinstance(memory, Runs):
        return memoryview(b"".join(memory.pieces(0, memory.nbytes)))
    return memory
