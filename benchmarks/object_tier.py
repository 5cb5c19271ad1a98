"""The object tier beside bare obstore, on a real S3 server and on files, in one run.

As many requests at a time on either side as the tier makes: 8 puts, 16 gets. Bare
obstore has as many workers; the tier has eight callers with two values each. A get ends
when the value is where it goes: bare obstore's is copied there by threads, too.
``--unverified`` leaves digests out. A ratio is the median of those of each round, and
the A/A is of bare obstore with itself. The server is moto's, in Python: it is slow and
shares the cores. Files are in memory if the folder is.

    PYTHONPATH=tests python -m benchmarks.object_tier [--rounds 5] [--folder /dev/shm]
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy
import obstore
from obstore.store import LocalStore, ObjectStore

from asynckv.stores.objects import ObjectTier
from benchmarks.pairing.runs import Figure, arguments_of, report
from benchmarks.pairing.tiers import (
    Batch,
    Side,
    TierSide,
    by_batches,
    figures_beside,
    memories_of,
    take_turns,
)
from harness.moto_server import MotoServer

__all__ = ("main",)

_PUTS, _GETS = 8, 16
_CALLS = 8
_LEAST_TOTAL, _LEAST_VALUES = 256 * 2**20, 32
# The server keeps in memory what has no more than 16 MiB, its header included.
_SIZES = {"2MiB": 2 * 2**20, "16MiB": 16 * 2**20 - 4096}
_BARS = {("get", "bare obstore"): 0.85, ("put", "bare obstore"): 0.9}


class _Bare(Side):
    """Obstore as its documentation has it, and a copy to where the value goes."""

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        count: int,
        memories: Sequence[memoryview],
    ) -> None:
        self._store, self._prefix = store, prefix
        self._count, self._memories = count, memories
        self._pool = concurrent.futures.ThreadPoolExecutor(2)

    async def put(self) -> None:
        async def put(batch: Batch) -> None:
            for job, memory in batch:
                path = f"{self._prefix}/{job}"
                await obstore.put_async(self._store, path, memory, use_multipart=False)

        await by_batches(self._count, self._memories[:_PUTS], _PUTS, put)

    async def get(self) -> None:
        loop = asyncio.get_running_loop()

        def land(data: Any, memory: memoryview) -> None:
            target = numpy.frombuffer(memory, numpy.uint8)
            numpy.copyto(target, numpy.frombuffer(data, numpy.uint8))

        async def get(batch: Batch) -> None:
            for job, memory in batch:
                found = await obstore.get_async(self._store, f"{self._prefix}/{job}")
                data = await found.bytes_async()
                await loop.run_in_executor(self._pool, land, data, memory)

        await by_batches(self._count, self._memories, _GETS, get)


async def _measure(
    kind: str, name: str, given: argparse.Namespace, store: ObjectStore, prefix: str
) -> list[Figure]:
    nbytes = _SIZES[name]
    count = max(_LEAST_TOTAL // nbytes, _LEAST_VALUES)
    memories = memories_of(nbytes, _GETS)
    async with ObjectTier(store, f"{prefix}/tier") as tier:
        await tier.probe()
        verified = not given.unverified
        sides = {
            "bare obstore": _Bare(store, f"{prefix}/bare", count, memories),
            "tier": TierSide(tier, count, memories, calls=_CALLS, is_verified=verified),
        }
        found = await take_turns(sides, given.rounds)
    return figures_beside(f"{kind} {name}", found, count * nbytes, _BARS)


def main() -> None:
    """Measure, print, and exit 1 where a limit is missed."""
    parser = arguments_of(__doc__, ("s3", "file"), rounds=5)
    parser.add_argument("--folder", default=None, help="where the files are")
    parser.add_argument("--unverified", action="store_true")
    given, figures = parser.parse_args(), list[Figure]()
    if "s3" in given.only:
        server = MotoServer()
        try:
            for name in _SIZES:
                measuring = _measure("s3", name, given, server.bucket(), name)
                figures += asyncio.run(measuring)
        finally:
            server.kill()
    if "file" in given.only:
        for name in _SIZES:
            with tempfile.TemporaryDirectory(dir=given.folder) as folder:
                path = folder.strip("/")
                figures += asyncio.run(
                    _measure("file", name, given, LocalStore(), path)
                )
    report(figures, given)


if __name__ == "__main__":
    main()
