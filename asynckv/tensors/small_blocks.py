"""Many small blocks of one size, copied in and out together.

To name each of them to the kernel, to the digest and to Python costs more than to
copy it once within the cache: one call here moves any number of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypeAlias

import numpy
import numpy.typing
from numpy.lib.stride_tricks import as_strided

__all__ = ("FEW_NBYTES", "SmallBlocks")

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
