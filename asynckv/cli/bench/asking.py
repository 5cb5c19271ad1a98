"""Cases of many small entries: ping, outstanding requests, insert and drop_select.

Each entry is inserted for one ``drop_select`` and leaves with it, as in earnest.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Iterator

import torch

from asynckv.cli.bench.measuring import Case, Sample
from asynckv.cli.bench.report import Subject
from asynckv.cli.bench.rig import LEFT_S, Rig

__all__ = ("open_outstanding", "open_pairs", "open_ping")

_INSERTS_AT_ONCE = 64


@contextlib.asynccontextmanager
async def open_ping(rig: Rig, subject: Subject, times: int) -> AsyncIterator[Case]:
    """Yield the case of one request at a time; its value is the median in us."""

    async def ours() -> Sample:
        _, calls = await _select_all(rig, subject, times)
        return _in_microseconds(calls)

    async def raw() -> Sample:
        return _in_microseconds(await rig.in_thread(rig.raw.ping, times))

    yield Case(ours, {"raw TCP ping": raw} if rig.is_bench else {})


@contextlib.asynccontextmanager
async def open_outstanding(
    rig: Rig, subject: Subject, requests: int
) -> AsyncIterator[Case]:
    """Yield the case of ``subject.outstanding`` requests at any time, a second."""

    async def ours() -> Sample:
        elapsed_s, calls = await _select_all(rig, subject, requests)
        return _a_second(elapsed_s, calls)

    async def bare() -> Sample:
        began_s = time.perf_counter()
        calls = await rig.streams.exchange(
            requests, subject.outstanding, subject.part_nbytes
        )
        return _a_second(time.perf_counter() - began_s, calls)

    yield Case(ours, {"bare asyncio streams": bare} if rig.is_bench else {})


@contextlib.asynccontextmanager
async def open_pairs(rig: Rig, subject: Subject, pairs: int) -> AsyncIterator[Case]:
    """Yield the case of insert and drop_select in turns; beside it two pings each."""
    tensor = torch.zeros(subject.part_nbytes, dtype=torch.uint8)

    async def ours() -> Sample:
        tokens = rig.new_tokens()
        calls = []
        for _ in range(pairs):
            began_s = time.perf_counter()
            await rig.lookup.insert(tokens, None, tensor, None, None, ttl_s=LEFT_S)
            await rig.lookup.drop_select(tokens)
            calls.append(time.perf_counter() - began_s)
        return _a_second(sum(calls), calls)

    async def raw() -> Sample:
        pings = await rig.in_thread(rig.raw.ping, 2 * pairs)
        calls = [a + b for a, b in zip(pings[::2], pings[1::2], strict=True)]
        return _a_second(sum(calls), calls)

    yield Case(ours, {"two raw TCP pings": raw} if rig.is_bench else {})


async def _select_all(
    rig: Rig, subject: Subject, requests: int
) -> tuple[float, list[float]]:
    """Insert, then select with so many outstanding; return the seconds of selecting."""
    tensor = torch.zeros(subject.part_nbytes, dtype=torch.uint8)
    tokens = rig.new_tokens()
    calls: list[float] = []

    async def insert(numbers: Iterator[int]) -> None:
        for _ in numbers:
            await rig.lookup.insert(tokens, None, tensor, None, None, ttl_s=LEFT_S)

    async def select(numbers: Iterator[int]) -> None:
        for _ in numbers:
            began_s = time.perf_counter()
            await rig.lookup.drop_select(tokens)
            calls.append(time.perf_counter() - began_s)

    numbers = iter(range(requests))
    async with asyncio.TaskGroup() as group:
        for _ in range(min(_INSERTS_AT_ONCE, requests)):
            group.create_task(insert(numbers))
    numbers = iter(range(requests))
    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(subject.outstanding, requests)):
            group.create_task(select(numbers))
    return time.perf_counter() - began_s, calls


def _in_microseconds(calls: list[float]) -> Sample:
    taken = tuple(call * 1e6 for call in calls)
    return Sample(statistics.median(taken), calls=taken)


def _a_second(elapsed_s: float, calls: list[float]) -> Sample:
    return Sample(len(calls) / elapsed_s, calls=tuple(call * 1e6 for call in calls))
