"""Cases of throughput: entries of any shape into memory that is there already."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine

from asynckv.abc import KVLookupBuffer
from asynckv.cli.bench.measuring import Case, Measurement, Sample
from asynckv.cli.bench.memory import Memory, copy_all, make_memory
from asynckv.cli.bench.raw_streams import name_of_streams
from asynckv.cli.bench.report import Subject
from asynckv.cli.bench.rig import LEFT_S, Rig

__all__ = ("open_fetching", "open_moving", "pull")

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
