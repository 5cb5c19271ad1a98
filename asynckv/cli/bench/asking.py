"""Cases of many small entries: ping, outstanding requests, insert and drop_select.

Each entry is inserted for one ``drop_select`` and leaves with it, as in earnest.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

import torch

from asynckv.cli.bench.echo import ECHO, ECHOES, Turns, in_turns
from asynckv.cli.bench.measuring import Case, Round, Sample
from asynckv.cli.bench.report import Subject
from asynckv.cli.bench.rig import LEFT_S, Rig

__all__ = ("open_outstanding", "open_pairs", "open_ping")

_INSERTS_AT_ONCE = 64


@contextlib.asynccontextmanager
async def open_ping(rig: Rig, subject: Subject, times: int) -> AsyncIterator[Case]:
    """Yield the case of one request at a time; its value is the median in us.

    In turns with a bare echo, of which one takes as many bytes there and back.
    """
    tokens = rig.new_tokens()

    async def select() -> None:
        await rig.lookup.drop_select(tokens)

    async def ours() -> Sample:
        _, calls = await _select_all(rig, subject, times)
        return _in_microseconds(calls)

    async def together() -> Round:
        await _insert_all(rig, subject, tokens, times)
        turns = await in_turns(times, select, _echo(rig, subject))
        return _round(ECHO, turns, _in_microseconds)

    yield Case(ours, {}, together=together if rig.is_bench else None)


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
    """Yield the case of insert and drop_select in turns; beside it two echoes each."""
    tensor = torch.zeros(subject.part_nbytes, dtype=torch.uint8)
    tokens = rig.new_tokens()

    async def pair() -> None:
        await rig.lookup.insert(tokens, None, tensor, None, None, ttl_s=LEFT_S)
        await rig.lookup.drop_select(tokens)

    async def ours() -> Sample:
        calls = []
        for _ in range(pairs):
            began_s = time.perf_counter()
            await pair()
            calls.append(time.perf_counter() - began_s)
        return _a_second(sum(calls), calls)

    async def together() -> Round:
        echo = _echo(rig, subject)

        async def two() -> None:
            await echo()
            await echo()

        turns = await in_turns(pairs, pair, two)
        return _round(ECHOES, turns, lambda calls: _a_second(sum(calls), calls))

    yield Case(ours, {}, together=together if rig.is_bench else None)


def _echo(rig: Rig, subject: Subject) -> Callable[[], Awaitable[bytes]]:
    body = bytes(subject.part_nbytes)
    return lambda: rig.echo.ping(body)


def _round(
    name: str, turns: Turns, sample: Callable[[Sequence[float]], Sample]
) -> Round:
    pair = sample(turns.before), sample(turns.after)
    return Round(sample(turns.ours), {name: pair})


async def _select_all(
    rig: Rig, subject: Subject, requests: int
) -> tuple[float, list[float]]:
    """Insert, then select with so many outstanding; return the seconds of selecting."""
    tokens = rig.new_tokens()
    calls: list[float] = []

    async def select(numbers: Iterator[int]) -> None:
        for _ in numbers:
            began_s = time.perf_counter()
            await rig.lookup.drop_select(tokens)
            calls.append(time.perf_counter() - began_s)

    await _insert_all(rig, subject, tokens, requests)
    numbers = iter(range(requests))
    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(subject.outstanding, requests)):
            group.create_task(select(numbers))
    return time.perf_counter() - began_s, calls


async def _insert_all(
    rig: Rig, subject: Subject, tokens: list[int], count: int
) -> None:
    tensor = torch.zeros(subject.part_nbytes, dtype=torch.uint8)

    async def insert(numbers: Iterator[int]) -> None:
        for _ in numbers:
            await rig.lookup.insert(tokens, None, tensor, None, None, ttl_s=LEFT_S)

    numbers = iter(range(count))
    async with asyncio.TaskGroup() as group:
        for _ in range(min(_INSERTS_AT_ONCE, count)):
            group.create_task(insert(numbers))


def _in_microseconds(calls: Sequence[float]) -> Sample:
    taken = tuple(call * 1e6 for call in calls)
    return Sample(statistics.median(taken), calls=taken)


def _a_second(elapsed_s: float, calls: Sequence[float]) -> Sample:
    return Sample(len(calls) / elapsed_s, calls=tuple(call * 1e6 for call in calls))
