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
import dataclasses
import math
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

import torch

from asynckv.abc import KVLookupBuffer
from asynckv.cli.bench.baselines import name_of_streams
from asynckv.cli.bench.report import Group, Subject, Unit, percentile
from asynckv.cli.bench.rig import LEFT_S, Memory, Rig, copy_all, make_memory
from asynckv.cli.bench.rounds import (
    Case,
    Measurement,
    Round,
    Sample,
    measure_between,
    measure_in_turns,
)
from asynckv.cli.bench.wording import write_nbytes
from asynckv.tensors.blocks import spec_in

__all__ = (
    "EDGES_MS",
    "Exhibit",
    "GiveBack",
    "ask",
    "case_of_shape",
    "catalogue",
    "in_microseconds",
    "open_lag",
    "open_moving",
    "open_outstanding",
    "open_pairs",
    "open_ping",
    "open_tail",
    "pull",
    "tick",
    "tick_beside",
)

_Transfer = Callable[[], Awaitable[float]]
"""Moves payload once and returns the seconds that count."""


class GiveBack(Exception):
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
            raise GiveBack
    except GiveBack:
        return elapsed_s


async def _take(lookup: KVLookupBuffer, tokens: list[int], memory: Memory) -> float:
    """Insert an entry, then select it for good; return the seconds of the latter.

    For servers which would not have it given back any number of times.
    """
    layers = memory.layers
    entry_id = await lookup.insert(tokens, None, layers, None, None, ttl_s=LEFT_S)
    try:
        began_s = time.perf_counter()
        await lookup.drop_select(tokens, into=memory.into)
        return time.perf_counter() - began_s
    except BaseException:
        await lookup.withdraw(entry_id)
        raise


@contextlib.asynccontextmanager
async def _placed(rig: Rig, memory: Memory) -> AsyncIterator[_Transfer]:
    """Yield what moves the entry of that memory from the other process, bytes checked.

    The entry is put there once, and taken out at the end.

    :raises WrongBytes: what landed was not what was sent
    """
    tokens, transfer = rig.new_tokens(), pull if rig.is_bench else _take
    move = partial(transfer, rig.lookup, tokens, memory)
    async with contextlib.AsyncExitStack() as stack:
        if rig.is_bench:
            entry_id = await rig.lookup.insert(
                tokens, None, memory.layers, None, None, ttl_s=None
            )
            stack.push_async_callback(rig.lookup.withdraw, entry_id)
        await rig.in_thread(memory.poison)
        await move()
        await rig.in_thread(memory.check)
        yield move


def _raw_transfers(rig: Rig, memory: Memory) -> dict[str, _Transfer]:
    """As many streams as the link has lanes, of which a tensor uses one; and one.

    None where the other side is no bench.
    """
    if not rig.is_bench:
        return {}
    most = min(rig.lanes, len(memory.layers))
    pull_raw, targets = rig.baselines.raw.pull, memory.target_views
    return {
        name_of_streams(count): partial(rig.in_thread, pull_raw, targets, count)
        for count in dict.fromkeys((most, 1))
    }


def _case(
    rig: Rig,
    ours: Measurement,
    baselines: Mapping[str, Measurement],
    edges: tuple[float, ...] = (),
) -> Case:
    return Case(lambda: measure_between(ours, baselines, rig.cpu_s), edges)


@contextlib.asynccontextmanager
async def open_moving(
    rig: Rig, subject: Subject, times: int, *, scattered: bool = False
) -> AsyncIterator[Case]:
    """Yield the case that moves such an entry so many times a measurement.

    Its value is in GB/s, or what a call takes in the median, where the unit says so.
    Its bytes are compared once, before anything counts.

    :raises WrongBytes: they differ
    """
    memory = await rig.in_thread(
        make_memory, subject.parts, subject.part_nbytes, scattered=scattered
    )

    def measuring(transfer: _Transfer) -> Measurement:
        async def measure() -> Sample:
            calls = [await transfer() for _ in range(times)]
            nbytes = memory.nbytes * times
            if subject.unit == "us":
                return in_microseconds(calls, nbytes)
            return Sample(nbytes / sum(calls) / 1e9, nbytes)

        return measure

    beside = _raw_transfers(rig, memory)
    if subject.unit == "GB/s":
        views = memory.target_views, memory.source_views
        beside["memcpy"] = partial(rig.in_thread, copy_all, *views)
    async with _placed(rig, memory) as transfer:
        baselines = {name: measuring(one) for name, one in beside.items()}
        yield _case(rig, measuring(transfer), baselines)


_INSERTS_AT_ONCE = 64


@contextlib.asynccontextmanager
async def open_ping(rig: Rig, subject: Subject, times: int) -> AsyncIterator[Case]:
    """Yield the case of one request at a time; its value is the median in us.

    In turns with a bare echo, of which one takes as many bytes there and back.
    """
    tokens = rig.new_tokens()
    body, bare = bytes(subject.part_nbytes), {}
    if rig.is_bench:
        bare["bare asyncio echo"] = lambda: rig.baselines.echo.ping(body)

    async def measure_round() -> Round:
        await _insert(rig, subject, tokens, times)
        select = partial(rig.lookup.drop_select, tokens)
        return await measure_in_turns(times, select, bare, in_microseconds)

    yield Case(measure_round)


@contextlib.asynccontextmanager
async def open_pairs(rig: Rig, subject: Subject, times: int) -> AsyncIterator[Case]:
    """Yield the case of insert and drop_select in turns; beside it two echoes each."""
    tensor = torch.zeros(subject.part_nbytes, dtype=torch.uint8)
    tokens = rig.new_tokens()
    body = bytes(subject.part_nbytes)

    async def pair() -> None:
        await rig.lookup.insert(tokens, None, tensor, None, None, ttl_s=LEFT_S)
        await rig.lookup.drop_select(tokens)

    async def two() -> None:
        await rig.baselines.echo.ping(body)
        await rig.baselines.echo.ping(body)

    bare = {"two bare asyncio echoes": two} if rig.is_bench else {}
    yield Case(lambda: measure_in_turns(times, pair, bare, _a_second))


@contextlib.asynccontextmanager
async def open_outstanding(
    rig: Rig, subject: Subject, times: int
) -> AsyncIterator[Case]:
    """Yield the case of ``subject.outstanding`` requests at any time, a second."""

    async def bare() -> Sample:
        began_s = time.perf_counter()
        calls = await rig.baselines.streams.exchange(
            times, subject.outstanding, subject.part_nbytes
        )
        return _a_second(calls, time.perf_counter() - began_s)

    beside = {"bare asyncio streams": bare} if rig.is_bench else {}
    yield _case(rig, lambda: ask(rig, subject, times), beside)


async def ask(rig: Rig, subject: Subject, times: int) -> Sample:
    """Insert, then select with so many outstanding; only the selecting counts."""
    tokens = rig.new_tokens()
    calls: list[float] = []

    async def select() -> None:
        began_s = time.perf_counter()
        await rig.lookup.drop_select(tokens)
        calls.append(time.perf_counter() - began_s)

    await _insert(rig, subject, tokens, times)
    began_s = time.perf_counter()
    await _at_once(subject.outstanding, times, select)
    return _a_second(calls, time.perf_counter() - began_s)


async def _insert(rig: Rig, subject: Subject, tokens: list[int], times: int) -> None:
    tensor = torch.zeros(subject.part_nbytes, dtype=torch.uint8)

    async def insert() -> None:
        await rig.lookup.insert(tokens, None, tensor, None, None, ttl_s=LEFT_S)

    await _at_once(_INSERTS_AT_ONCE, times, insert)


async def _at_once(
    most: int, times: int, call: Callable[[], Awaitable[object]]
) -> None:
    """Make so many calls, at most so many of them at any time."""
    numbers = iter(range(times))

    async def call_on() -> None:
        for _ in numbers:
            await call()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(most, times)):
            group.create_task(call_on())


def in_microseconds(calls: Sequence[float], nbytes: int = 0) -> Sample:
    """Return what calls took: the median."""
    taken = tuple(call * 1e6 for call in calls)
    return Sample(statistics.median(taken), nbytes, taken)


def _a_second(calls: Sequence[float], elapsed_s: float | None = None) -> Sample:
    """How many calls a second; one after the other if it is not said how long."""
    taken = tuple(call * 1e6 for call in calls)
    return Sample(len(calls) / (elapsed_s or sum(calls)), calls=taken)


@contextlib.asynccontextmanager
async def open_tail(rig: Rig, subject: Subject, compute_ms: int) -> AsyncIterator[Case]:
    """Yield the case; a layer's compute is pretended by waiting so long.

    No transfer can beat one raw layer, which is the first baseline; the second
    is asynckv itself, with the whole entry inserted after the compute.
    """
    memory = await rig.in_thread(make_memory, subject.parts, subject.part_nbytes)
    views = memory.source_views

    async def raw() -> Sample:
        elapsed_s = await rig.in_thread(rig.baselines.raw.push, views[:1])
        return Sample(elapsed_s * 1e3, views[0].nbytes)

    yield _case(
        rig,
        lambda: _send_by_layer(rig, memory, compute_ms / 1e3),
        {
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


async def tick_beside(
    ticks: int, call: Callable[[], Awaitable[object]]
) -> tuple[list[float], int]:
    """As :func:`tick`, while calls follow each other; return their number too."""
    ticker = asyncio.create_task(tick(ticks), name="ticker of the bench")
    calls = 0
    try:
        while not ticker.done():
            await call()
            calls += 1
    finally:
        ticker.cancel()
        await asyncio.wait({ticker})
    return ticker.result(), calls


@contextlib.asynccontextmanager
async def open_lag(rig: Rig, subject: Subject, times: int) -> AsyncIterator[Case]:
    """Yield the case of back-to-back transfers; its value is the p99 of a round."""
    memory = await rig.in_thread(make_memory, subject.parts, subject.part_nbytes)

    def late(lags_ms: list[float], transfers: int = 0) -> Sample:
        moved = transfers * memory.nbytes
        return Sample(percentile(lags_ms, 0.99), moved, tuple(lags_ms))

    async def idle() -> Sample:
        return late(await tick(times))

    async with _placed(rig, memory) as transfer:

        async def ours() -> Sample:
            return late(*await tick_beside(times, transfer))

        yield _case(rig, ours, {"idle loop": idle}, EDGES_MS)


_KIB, _MIB = 2**10, 2**20
_MAX_REPEATS = 100
_MAX_TENSORS = 4096

_UNITS: Mapping[Group, tuple[Unit, bool]] = {
    "throughput": ("GB/s", True),
    "blocks": ("GB/s", True),
    "latency": ("us", False),
    "concurrency": ("requests/s", True),
    "tail": ("ms", False),
    "rate": ("pairs/s", True),
    "lag": ("ms", False),
}
"""The unit of a group's values, and whether higher is better."""

_Opening = Callable[[Rig, Subject, int], AbstractAsyncContextManager[Case]]


@dataclasses.dataclass(frozen=True)
class Exhibit:
    """A subject, how to open its case, and how much of it is one measurement.

    That is a number of calls, transfers or ticks, or the milliseconds of a layer.
    """

    subject: Subject
    opening: _Opening
    amount: int

    def open(self, rig: Rig) -> AbstractAsyncContextManager[Case]:
        """Yield the case while it is entered."""
        return self.opening(rig, self.subject, self.amount)


def _exhibit(
    group: Group,
    case: str,
    title: str,
    shape: tuple[int, int],
    opening: _Opening,
    amount: int,
    *,
    outstanding: int = 1,
) -> Exhibit:
    parts, nbytes = shape
    subject = Subject(case, title, group, *_UNITS[group], nbytes, parts, outstanding)
    return Exhibit(subject, opening, amount)


def catalogue(*, quick: bool) -> list[Exhibit]:
    """Return every case; ``quick`` ones are tiny, and have the same names.

    Only where a size or a number is in a name are there fewer of them.
    """
    sizes = [64 * _KIB, _MIB]
    if not quick:
        sizes = [64 * _KIB, 256 * _KIB, _MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB]
    layers = (8, 256 * _KIB) if quick else (64, 16 * _MIB)
    small = (100, 4 * _KIB) if quick else (10_000, 4 * _KIB)
    total = write_nbytes(math.prod(layers))
    scattered = partial(open_moving, scattered=True)
    pools = [
        (max(1, (4 if quick else 32) * _MIB // nbytes), nbytes)
        for nbytes in (4 * _KIB, 8 * _KIB, 18 * _KIB, 64 * _KIB, 2 * _MIB)
    ]

    def moving(
        group: Group,
        case: str,
        title: str,
        shape: tuple[int, int],
        opening: _Opening = open_moving,
    ) -> Exhibit:
        repeats = _repeats(shape, quick=quick)
        return _exhibit(group, case, title, shape, opening, repeats)

    return [
        *(
            moving("throughput", f"entry-{n}", f"{write_nbytes(n)} entry", (1, n))
            for n in sizes
        ),
        moving(
            "throughput", "layers", f"{total} as {_words(layers, 'layers')}", layers
        ),
        moving("blocks", "small", _words(small, "tensors"), small),
        *(
            moving(
                "blocks",
                f"scattered-{shape[1]}",
                _words(shape, "scattered blocks"),
                shape,
                scattered,
            )
            for shape in pools
        ),
        *_asked(quick, entry=sizes[-1]),
    ]


def _asked(quick: bool, entry: int) -> list[Exhibit]:
    """Return the cases of what one waits for, one call or some at a time."""
    tail = (4, 64 * _KIB) if quick else (32, 4 * _MIB)
    tiny = (1, 64)
    return [
        _exhibit(
            "latency",
            "ping",
            "64-byte drop_select, round trip",
            tiny,
            open_ping,
            10 if quick else 1000,
        ),
        _exhibit(
            "latency",
            "fetch",
            "2 MiB fetch",
            (1, 2 * _MIB),
            open_moving,
            2 if quick else 100,
        ),
        *_outstanding(quick),
        _exhibit(
            "tail",
            "tail",
            f"layer-wise tail of {_words(tail, 'layers')}",
            tail,
            open_tail,
            1 if quick else 10,
        ),
        _exhibit(
            "rate",
            "pairs",
            "insert and drop_select of 64 bytes, in turns",
            tiny,
            open_pairs,
            5 if quick else 500,
        ),
        _exhibit(
            "lag",
            "lag",
            f"loop lag p99 while entries of {write_nbytes(entry)} move",
            (4, entry // 4),
            open_lag,
            10 if quick else 1000,
        ),
    ]


def _outstanding(quick: bool) -> list[Exhibit]:
    """Return the cases of some small requests at a time."""
    return [
        _exhibit(
            "concurrency",
            f"outstanding-{most}",
            f"16 KiB requests, {most:,} outstanding",
            (1, 16 * _KIB),
            open_outstanding,
            20 if quick else 2000,
            outstanding=most,
        )
        for most in ((1, 10) if quick else (1, 10, 100, 1000))
    ]


def case_of_shape(shape: tuple[int, int], *, quick: bool) -> Exhibit:
    """Return the case of an entry of the user's own shape, tensors by bytes of each."""
    parts, nbytes = shape
    title = _words(shape, "tensor" if parts == 1 else "tensors")
    case, repeats = f"shape-{parts}x{nbytes}", _repeats(shape, quick=quick)
    return _exhibit("throughput", case, title, shape, open_moving, repeats)


def _repeats(shape: tuple[int, int], *, quick: bool) -> int:
    """How often to transfer in one measurement, so that it takes long enough."""
    enough = (128 * _KIB if quick else 256 * _MIB) // math.prod(shape)
    return max(1, min(enough, _MAX_REPEATS, _MAX_TENSORS // shape[0]))


def _words(shape: tuple[int, int], noun: str) -> str:
    parts, nbytes = shape
    return f"{parts:,} {noun} of {write_nbytes(nbytes)}"
