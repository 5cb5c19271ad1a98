from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from asynckv.cli.bench.baselines import name_of_streams
from asynckv.cli.bench.cases import (
    EDGES_MS,
    case_of_shape,
    catalogue,
    open_lag,
    open_moving,
    open_outstanding,
    open_pairs,
    open_ping,
    open_tail,
    pull,
    tick,
)
from asynckv.cli.bench.report import Subject
from asynckv.cli.bench.rig import Rig, make_memory
from asynckv.cli.bench.rounds import Case, Sample

Counter = Callable[[], Awaitable[int]]
SUBJECT = Subject("small", "small", "blocks", "GB/s", True, 70_000, 3)
FETCH = Subject("fetch", "fetch", "latency", "us", False, 70_000)
PING = Subject("ping", "ping", "latency", "us", False, 64)
PAIRS = Subject("pairs", "pairs", "rate", "pairs/s", True, 64)


def asking(outstanding: int) -> Subject:
    return Subject(
        "n", "n", "concurrency", "requests/s", True, 100, outstanding=outstanding
    )


async def measured(case: Case) -> dict[str, Sample]:
    """What one round finds: asynckv first, and of each baseline the first turn."""
    found = await case.measure_round()
    beside = {name: first for name, (first, _) in found.baselines.items()}
    samples = {"asynckv": found.ours, **beside}
    assert min(sample.value for sample in samples.values()) > 0
    return samples


CASES = {one.subject.case: one.subject for one in catalogue(quick=False)}


def test_every_promised_case_is_there() -> None:
    sizes = [2**10 * size for size in (64, 256, 1024, 4096, 16 * 1024, 64 * 1024)]
    assert list(CASES) == [
        *(f"entry-{size}" for size in sizes),
        *("layers", "small"),
        *(f"scattered-{size}" for size in (4096, 8192, 18432, 65536, 2 * 2**20)),
        *("ping", "fetch"),
        *(f"outstanding-{number}" for number in (1, 10, 100, 1000)),
        *("tail", "pairs", "lag"),
    ]


@pytest.mark.parametrize(
    ("case", "title"),
    [
        ("layers", "1 GiB as 64 layers of 16 MiB"),
        ("small", "10,000 tensors of 4 KiB"),
        ("entry-67108864", "64 MiB entry"),
        ("scattered-18432", "1,820 scattered blocks of 18 KiB"),
        ("outstanding-1000", "16 KiB requests, 1,000 outstanding"),
        ("tail", "layer-wise tail of 32 layers of 4 MiB"),
        ("lag", "loop lag p99 while entries of 64 MiB move"),
    ],
)
def test_titles_say_what_moves(case: str, title: str) -> None:
    assert CASES[case].title == title


def test_quick_cases_are_some_of_all_cases_but_tiny() -> None:
    quick = [one.subject for one in catalogue(quick=True)]
    assert {one.case for one in quick} <= set(CASES)
    assert max(one.parts * one.part_nbytes for one in quick) <= 4 * 2**20


@pytest.mark.parametrize(
    ("shape", "title"),
    [((1, 1024), "1 tensor of 1 KiB"), ((2000, 2**20), "2,000 tensors of 1 MiB")],
)
def test_a_shape_of_one_s_own_is_a_case(shape: tuple[int, int], title: str) -> None:
    subject = case_of_shape(shape, quick=False).subject
    assert (subject.case, subject.title) == ("shape-{}x{}".format(*shape), title)


@pytest.mark.parametrize("scattered", [False, True])
async def test_every_contender_moves_all_bytes_so_many_times(
    rig: Rig, scattered: bool
) -> None:
    async with open_moving(rig, SUBJECT, 2, scattered=scattered) as case:
        samples = await measured(case)
    streams = min(rig.lanes, 1 if scattered else 3)
    raw = [name_of_streams(streams), name_of_streams(1)]
    assert list(samples) == ["asynckv", *dict.fromkeys(raw), "memcpy"]
    assert {sample.nbytes for sample in samples.values()} == {420_000}


async def test_a_case_takes_its_entry_away_with_it(rig: Rig, any_left: Counter) -> None:
    async with open_moving(rig, SUBJECT, 1):
        assert await any_left() == 1
    assert await any_left() == 0


async def test_a_server_that_is_no_bench_has_each_entry_taken_for_good(
    plain_rig: Rig,
) -> None:
    async with open_moving(plain_rig, SUBJECT, 7) as case:
        samples = await measured(case)
    assert list(samples) == ["asynckv", "memcpy"]
    assert samples["asynckv"].nbytes == 7 * 210_000
    async with open_moving(plain_rig, FETCH, 3) as case:
        assert list(await measured(case)) == ["asynckv"]
    assert await plain_rig.lookup.peek(plain_rig.prefix) == 0


async def test_a_pull_lands_in_the_memory_and_leaves_the_entry(rig: Rig) -> None:
    memory = make_memory(2, 100_000)
    await rig.lookup.insert([7], None, memory.layers, None, None)
    memory.poison()
    for _ in range(3):
        assert await pull(rig.lookup, [7], memory) > 0
    memory.check()


async def test_each_fetch_is_timed(rig: Rig) -> None:
    async with open_moving(rig, FETCH, 3) as case:
        samples = await measured(case)
    assert {name: len(one.calls) for name, one in samples.items()} == {
        "asynckv": 3,
        "raw TCP, 1 stream": 3,
    }
    ours = samples["asynckv"]
    assert ours.value == sorted(ours.calls)[1]


@pytest.mark.parametrize(
    ("opening", "subject", "count", "name", "beside"),
    [
        (open_ping, PING, 25, "bare asyncio echo", 20),
        (open_pairs, PAIRS, 4, "two bare asyncio echoes", 10),
        *((open_outstanding, asking(n), 7, "bare asyncio streams", 7) for n in (1, 3)),
        (open_outstanding, asking(100), 7, "bare asyncio streams", 7),
    ],
)
async def test_as_many_calls_are_made_as_are_timed_and_no_entry_is_left(
    rig: Rig,
    any_left: Counter,
    opening: Any,
    subject: Subject,
    count: int,
    name: str,
    beside: int,
) -> None:
    async with opening(rig, subject, count) as case:
        samples = await measured(case)
    calls = {name: len(sample.calls) for name, sample in samples.items()}
    assert calls == {"asynckv": count, name: beside}
    assert await any_left() == 0


@pytest.mark.parametrize(
    ("opening", "subject"),
    [(open_ping, PING), (open_pairs, PAIRS), (open_outstanding, asking(1))],
)
async def test_a_server_that_is_no_bench_is_asked_with_nothing_beside_it(
    plain_rig: Rig, opening: Any, subject: Subject
) -> None:
    async with opening(plain_rig, subject, 5) as case:
        samples = await measured(case)
    assert {name: len(one.calls) for name, one in samples.items()} == {"asynckv": 5}
    assert await plain_rig.lookup.peek(plain_rig.prefix) == 0


async def test_every_tick_is_noted() -> None:
    assert len(await tick(4)) == 4


async def test_payload_moves_for_as_long_as_the_ticker_runs(
    rig: Rig, any_left: Counter
) -> None:
    subject = Subject("lag", "lag", "lag", "ms", False, 70_000, 2)
    async with open_lag(rig, subject, 5) as case:
        samples = await measured(case)
    ours, idle = samples["asynckv"], samples["idle loop"]
    assert (len(ours.calls), len(idle.calls)) == (5, 5)
    assert ours.nbytes >= 140_000
    assert idle.nbytes == 0
    assert ours.value == max(ours.calls)
    assert case.edges == EDGES_MS == tuple(sorted(set(EDGES_MS)))
    assert await any_left() == 0


async def test_every_layer_arrives_and_leaves_nothing_behind(
    rig: Rig, any_left: Counter
) -> None:
    subject = Subject("tail", "tail", "tail", "ms", False, 70_000, 3)
    async with open_tail(rig, subject, 0) as case:
        samples = await measured(case)
    assert {name: sample.nbytes for name, sample in samples.items()} == {
        "asynckv": 210_000,
        "one layer over raw TCP": 70_000,
        "asynckv in bulk": 210_000,
    }
    assert await any_left() == 0
