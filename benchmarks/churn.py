"""How much of a lookup buffer's memory stays usable while entries come and go.

Entries of 2 to 128 tensors of 4 KiB to 16 MiB are inserted without an end into a
buffer that is full; whenever one has to wait, the share of ``max_bytes`` that was
asked for with it is noted (1, if it would have been too much for any buffer of that
bound), and entries leave in any order until it has room. A quarter of the entries is
leased and stays, whatever else leaves. Minor page faults of the whole process are
counted once the buffer is full: memory that is used again has none. The exit status is
1 if a limit is missed.

    python -m benchmarks.churn [--seconds 600] [--max-bytes 4GiB] [--seed 0] [--json]
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import time
from collections.abc import Callable
from typing import Final, TypeAlias

import torch

import asynckv
from asynckv.abc import SelectStream
from asynckv.cli.process import run
from asynckv.types import parse_bytes
from benchmarks.pairing.runs import Figure, arguments_of, figures_of, report

__all__ = ("main",)

_LEAST, _MOST = 4096, 16 * 2**20
_LEASED: Final = 0.25
_FAULTS: Final = 0.05

_Draw: TypeAlias = Callable[[random.Random, int], list[int]]
_Lease: TypeAlias = contextlib.AbstractAsyncContextManager[SelectStream, bool | None]


class Churn:
    """A buffer, who is in it, and what share of it was asked for at each refusal."""

    def __init__(self, buffer: asynckv.LookupBuffer, random_: random.Random) -> None:
        self._buffer = buffer
        self._random = random_
        self._source = torch.ones(_MOST, dtype=torch.uint8)
        self._inside: list[str] = []
        self._leased: list[_Lease] = []
        self.shares: list[float] = []
        self.entries = self.moved_bytes = 0

    async def run(self, draw: _Draw, end_s: float) -> None:
        while time.monotonic() < end_s:
            await self._insert(draw)
            while len(self._leased) * 3 < len(self._inside):
                entry_id = self._inside.pop(self._random.randrange(len(self._inside)))
                self._leased.append(self._buffer.open_drop_select(entry_id=entry_id))
                await self._leased[-1].__aenter__()

    async def leave(self) -> None:
        """Let all who hold an entry let it go."""
        while self._leased:
            await self._leased.pop().__aexit__(None, None, None)

    async def _insert(self, draw: _Draw) -> None:
        max_bytes = self._buffer.statistics().max_bytes
        sizes = draw(self._random, self._random.randint(2, 128))
        while sum(sizes) > max_bytes // 4:
            sizes = draw(self._random, self._random.randint(2, 128))
        tensors = {str(i): self._source[:nbytes] for i, nbytes in enumerate(sizes)}
        inserting = asyncio.create_task(
            self._buffer.insert(None, None, tensors, None, None, ttl_s=None)
        )
        while not inserting.done():
            statistics = self._buffer.statistics()
            asked = (statistics.used_bytes + sum(sizes)) / max_bytes
            # Until the buffer has all its memory, that is what is waited for.
            is_growing = self._buffer.growth.arena.is_growing and asked <= 1
            if statistics.waiting_inserts and not is_growing:
                self.shares.append(min(1.0, asked))
                await self._let_one_leave()
            await asyncio.wait({inserting}, timeout=0.0005)
        self._inside.append(inserting.result())
        self.entries += 1
        self.moved_bytes += sum(sizes)

    async def _let_one_leave(self) -> None:
        too_many = len(self._leased) * 3 >= len(self._inside)
        if self._leased and too_many and self._random.random() < _LEASED:
            index = self._random.randrange(len(self._leased))
            await self._leased.pop(index).__aexit__(None, None, None)
            return
        entry_id = self._inside.pop(self._random.randrange(len(self._inside)))
        async with self._buffer.open_drop_select(entry_id=entry_id):
            pass  # left cleanly, it is gone


def of_one_size(random_: random.Random, count: int) -> list[int]:
    return [_nbytes(random_)] * count


def of_all_sizes(random_: random.Random, count: int) -> list[int]:
    return [_nbytes(random_) for _ in range(count)]


def _nbytes(random_: random.Random) -> int:
    return int(_LEAST * (_MOST / _LEAST) ** random_.random())


async def measure(
    name: str, draw: _Draw, max_bytes: int, seconds: float, seed: int
) -> list[Figure]:
    buffer = asynckv.LookupBuffer(max_bytes, drain_s=0)
    async with buffer:
        churn = Churn(buffer, random.Random(seed))
        await churn.run(draw, time.monotonic() + seconds / 10)
        while buffer.growth.arena.is_growing:  # its pages are mapped once
            await churn.run(draw, time.monotonic() + 1)
        warm = len(churn.shares), churn.entries, churn.moved_bytes, _faults()
        await churn.run(draw, time.monotonic() + seconds)
        await churn.leave()
        faults = _faults() - warm[3]
    shares = sorted(churn.shares[warm[0] :]) or [0.0]
    entries = churn.entries - warm[1]
    moved_bytes = churn.moved_bytes - warm[2]
    pages = moved_bytes / resource.getpagesize()
    said = {
        "entries": entries,
        "refusals": len(shares),
        "usable, p1": shares[len(shares) // 100],
        "GiB moved": moved_bytes / 2**30,
        "pages moved an entry": pages / entries,
        "page faults an entry": faults / entries,
    }
    mean = sum(shares) / len(shares)
    return [
        *figures_of(name, said),
        Figure(f"{name}: usable, mean", mean, at_least=0.9),
        Figure(f"{name}: usable, least", shares[0], at_least=0.9),
        Figure(f"{name}: page faults a page moved", faults / pages, at_most=_FAULTS),
    ]


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def main() -> None:
    """Run both mixes, print them, and exit 1 where a limit is missed."""
    parser = arguments_of(__doc__, seconds=600.0, max_bytes="4GiB", seed=0)
    given, figures = parser.parse_args(), list[Figure]()
    max_bytes, each_s = parse_bytes(given.max_bytes), given.seconds / 2
    for name, draw in (("one size", of_one_size), ("all sizes", of_all_sizes)):
        figures += run(measure(name, draw, max_bytes, each_s, given.seed))
    report(figures, given)


if __name__ == "__main__":
    main()
