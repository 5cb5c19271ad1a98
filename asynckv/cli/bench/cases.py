"""What is measured: throughput, small entries, layers of a prefill, the event loop.

Throughput is that of entries of any shape into memory that is there already. Of small
ones: ping, outstanding requests, insert and drop_select; each entry is inserted for one
``drop_select`` and leaves with it, as in earnest. Of a prefill that sends each layer
while it computes the next one the tail counts: from the last layer's end of compute
until the entry is committed in the other process. Of the event loop how late it runs a
ticker while payload moves, beside the same ticker with nothing to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Sequence,
)

import torch

from asynckv.abc import KVLookupBuffer
from asynckv.cli.bench.baselines import name_of_streams
from asynckv.cli.bench.echo import ECHO, ECHOES, Turns, in_turns
from asynckv.cli.bench.report import Subject, percentile
from asynckv.cli.bench.rig import LEFT_S, Memory, Rig, copy_all, make_memory
from asynckv.cli.bench.rounds import Case, Measurement, Round, Sample
from asynckv.tensors.blocks import spec_in

__all__ = (
    "EDGES_MS",
    "open_fetching",
    "open_lag",
    "open_moving",
    "open_outstanding",
    "open_pairs",
    "open_ping",
    "open_tail",
    "pull",
    "tick",
)


_Transfer = Callable[[], Coroutine[object, object, float]]


class _GiveBack(Exception):
    """Leaves ``async with drop_select()`` so that the entry stays."""


async def pull(lookup: KVLookupBuffer, tokens: list[int], memory: Memory) -> float:
    """Select the entry into ``memory`` and give it back; return the seconds.

    They count until the last tensor is verified and in its place.
    """
    into = memory.into
    began_s = time.perf_counter()
    try:
        async with lookup.drop_select(tokens, into=into):
            elapsed_s = time.perf_counter() - began_s
            raise _GiveBack
    except _GiveBack:
        return elapsed_s


async def _take(lookup: KVLookupBuffer, tokens: list[int], memory: Memory) -> float:
    """Insert an entry, then select it for good; return the seconds of the latter.

    For servers which would not have it given back any number of times.
    """
    entry_id = await lookup.insert(
        tokens, None, memory.layers, None, None, ttl_s=LEFT_S
    )
    try:
        began_s = time.perf_counter()
        await lookup.drop_select(tokens, into=memory.into)
        return time.perf_counter() - began_s
    except BaseException:
        await lookup.withdraw(entry_id)
        raise


@contextlib.asynccontextmanager
async def _placed(
    rig: Rig, subject: Subject, *, scattered: bool = False
) -> AsyncIterator[tuple[_Transfer, Memory]]:
    """Yield what moves an entry of that shape from the other process, bytes checked.

    The entry is put there once, and taken out at the end.
    """
    memory = await rig.in_thread(
        make_memory, subject.parts, subject.part_nbytes, scattered=scattered
    )
    tokens = rig.new_tokens()

    async def check(transfer: _Transfer) -> None:
        await rig.in_thread(memory.poison)
        await transfer()
        await rig.in_thread(memory.check)

    if not rig.is_bench:
        await check(lambda: _take(rig.lookup, tokens, memory))
        yield lambda: _take(rig.lookup, tokens, memory), memory
        return
    entry_id = await rig.lookup.insert(
        tokens, None, memory.layers, None, None, ttl_s=None
    )
    try:
        await check(lambda: pull(rig.lookup, tokens, memory))
        yield lambda: pull(rig.lookup, tokens, memory), memory
    finally:
        await rig.lookup.withdraw(entry_id)


@contextlib.asynccontextmanager
async def open_moving(
    rig: Rig, subject: Subject, *, repeats: int, scattered: bool = False
) -> AsyncIterator[Case]:
    """Yield the case that moves such an entry ``repeats`` times a measurement.

    Its bytes are compared once, before anything counts.

    :raises WrongBytes: they differ
    """
    async with _placed(rig, subject, scattered=scattered) as (transfer, memory):
        sources, targets = memory.source_views, memory.target_views

        async def measure(transfer: _Transfer) -> Sample:
            elapsed_s = sum([await transfer() for _ in range(repeats)])
            nbytes = memory.nbytes * repeats
            return Sample(nbytes / elapsed_s / 1e9, nbytes)

        yield Case(
            ours=lambda: measure(transfer),
            baselines={
                **_raw_baselines(rig, targets, len(memory.layers), measure),
                "memcpy": lambda: measure(
                    lambda: rig.in_thread(copy_all, targets, sources)
                ),
            },
        )


def _raw_baselines(
    rig: Rig,
    targets: list[memoryview],
    tensors: int,
    measure: Callable[[_Transfer], Coroutine[object, object, Sample]],
) -> dict[str, Measurement]:
    """As many streams as the link has lanes, of which a tensor uses one; and one.

    None where the other side is no bench.
    """
    if not rig.is_bench:
        return {}

    def over(streams: int) -> Measurement:
        pull_raw = rig.raw_streams.pull
        return lambda: measure(lambda: rig.in_thread(pull_raw, targets, streams))

    most = min(rig.lanes, tensors)
    return {name_of_streams(count): over(count) for count in dict.fromkeys((most, 1))}


@contextlib.asynccontextmanager
async def open_fetching(rig: Rig, subject: Subject, times: int) -> AsyncIterator[Case]:
    """Yield the case that fetches one entry again and again, each call timed.

    :raises WrongBytes: what landed was not what was sent
    """
    async with _placed(rig, subject) as (transfer, memory):
        targets = memory.target_views

        async def measure(transfer: _Transfer) -> Sample:
            calls = [await transfer() * 1e6 for _ in range(times)]
            value = sorted(calls)[len(calls) // 2]
            return Sample(value, memory.nbytes * times, tuple(calls))

        yield Case(
            ours=lambda: measure(transfer),
            baselines=_raw_baselines(rig, targets, len(memory.layers), measure),
        )


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


@contextlib.asynccontextmanager
async def open_tail(
    rig: Rig, subject: Subject, compute_s: float
) -> AsyncIterator[Case]:
    """Yield the case; a layer's compute is pretended by waiting ``compute_s``.

    No transfer can beat one raw layer, which is the first baseline; the second
    is asynckv itself, with the whole entry inserted after the compute.
    """
    memory = await rig.in_thread(make_memory, subject.parts, subject.part_nbytes)
    views = memory.source_views

    async def raw() -> Sample:
        elapsed_s = await rig.in_thread(rig.raw.push, views[:1])
        return Sample(elapsed_s * 1e3, views[0].nbytes)

    yield Case(
        ours=lambda: _send_by_layer(rig, memory, compute_s),
        baselines={
            "one layer over raw TCP": raw,
            "asynckv in bulk": lambda: _send_in_bulk(rig, memory),
        },
    )


async def _send_by_layer(rig: Rig, memory: Memory, compute_s: float) -> Sample:
    specs = {f"{name}.key": spec_in(one) for name, one in memory.layers.items()}
    tokens = rig.new_tokens()
    async with rig.lookup.open_insert(tokens, None, specs) as writer:
        async with asyncio.TaskGroup() as group:
            for name, layer in memory.layers.items():
                await asyncio.sleep(compute_s)
                computed_s = time.perf_counter()
                group.create_task(writer.put(f"{name}.key", layer))
    tail_s = time.perf_counter() - computed_s
    await rig.lookup.withdraw(writer.entry_id)
    return Sample(tail_s * 1e3, memory.nbytes)


async def _send_in_bulk(rig: Rig, memory: Memory) -> Sample:
    tokens = rig.new_tokens()
    began_s = time.perf_counter()
    entry_id = await rig.lookup.insert(tokens, None, memory.layers, None, None)
    elapsed_s = time.perf_counter() - began_s
    await rig.lookup.withdraw(entry_id)
    return Sample(elapsed_s * 1e3, memory.nbytes)


EDGES_MS = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 1000.0)
_EVERY_S = 0.001


async def tick(ticks: int) -> list[float]:
    """Return by how many milliseconds each of so many ticks of 1 ms came late."""
    lags_ms = []
    for _ in range(ticks):
        began_s = time.perf_counter()
        await asyncio.sleep(_EVERY_S)
        lags_ms.append((time.perf_counter() - began_s - _EVERY_S) * 1e3)
    return lags_ms


@contextlib.asynccontextmanager
async def open_lag(rig: Rig, subject: Subject, ticks: int) -> AsyncIterator[Case]:
    """Yield the case of back-to-back transfers; its value is the p99 of a round."""
    memory = await rig.in_thread(make_memory, subject.parts, subject.part_nbytes)
    tokens = rig.new_tokens()
    entry_id = await rig.lookup.insert(
        tokens, None, memory.layers, None, None, ttl_s=None
    )

    async def ours() -> Sample:
        ticker = asyncio.create_task(tick(ticks), name="ticker of the bench")
        moved = 0
        try:
            while not ticker.done():
                await pull(rig.lookup, tokens, memory)
                moved += memory.nbytes
        finally:
            ticker.cancel()
            await asyncio.wait({ticker})
        return _late(ticker.result(), moved)

    async def idle() -> Sample:
        return _late(await tick(ticks))

    try:
        yield Case(ours, {"idle loop": idle}, EDGES_MS)
    finally:
        await rig.lookup.withdraw(entry_id)


def _late(lags_ms: list[float], moved: int = 0) -> Sample:
    return Sample(percentile(lags_ms, 0.99), moved, tuple(lags_ms))
