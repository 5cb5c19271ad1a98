"""What is asked of every input, and how a broken promise is told."""

from __future__ import annotations

import itertools
import random
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from harness.fuzzing.corpus import Corpus

__all__ = ("Finding", "Target", "expect", "measured", "pieces_of")

_EDGES: Final = (1, 4, 35, 36, 37, 56)
_SHORT: Final = 160


class Finding(Exception):
    """An input for which a promise does not hold."""


class Target(NamedTuple):
    """One thing to be fuzzed.

    ``check(data)`` raises whatever is wrong: a :exc:`Finding`, or the exception
    that nobody documented. It depends on nothing but ``data``.
    """

    name: str
    make: Callable[[random.Random, Corpus], bytes]
    check: Callable[[bytes], None]


def expect(holds: bool, what: str, *details: Any) -> None:
    """Tell of a broken promise unless it ``holds``.

    :raises Finding: it does not
    """
    if not holds:
        raise Finding(f"{what}: {', '.join(f'{d!r:.300}' for d in details)}")


def pieces_of(data: bytes) -> Sequence[bytes]:
    """Cut ``data`` in pieces, always the same for the same data."""
    nbytes, noise = len(data), zlib.crc32(data)
    if nbytes <= _SHORT and noise % 16 == 0:
        return [data[i : i + 1] for i in range(nbytes)]
    cuts = {0, nbytes}
    for factor in (1, 7, 49)[: noise % 3 + 1]:
        cuts.add(noise * factor // 4 % (nbytes + 1))
    if noise & 16:
        edge = _EDGES[noise % len(_EDGES)]
        cuts |= {min(edge, nbytes), max(0, nbytes - edge)}
    return [data[a:b] for a, b in itertools.pairwise(sorted(cuts))]


def measured(check: Callable[[bytes], None], data: bytes) -> int:
    """Run ``check(data)`` and return the most bytes that it held at a time."""
    tracemalloc.start()
    try:
        check(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
