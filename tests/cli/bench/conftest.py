"""A rig whose other side is in this process, and a report with made-up figures."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

import asynckv
from asynckv.cli.bench.report import (
    FORMAT,
    Baseline,
    BenchReport,
    Group,
    Histogram,
    Machine,
    Measured,
    Percentiles,
    Row,
    Settings,
    Spread,
    Subject,
    Unit,
)
from asynckv.cli.bench.rig import Rig, open_rig
from asynckv.cli.bench.server import serving

__all__ = ("any_left", "plain_rig", "rig", "sample_report", "void_row")

_CALLS = Percentiles(5000, 210.0, 300.0, 420.0, 3000.0)
_EDGES = (0.0, 1.0, 10.0, 1000.0)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """Return what cases measure with; the serving side is in this process too."""
    settings = Settings()
    async with serving("tcp://127.0.0.1:0", settings) as url:
        async with open_rig(url, settings) as rig:
            yield rig


@pytest.fixture
async def plain_rig() -> AsyncIterator[Rig]:
    """Return what cases measure with where the server is a lookup buffer, no bench."""
    async with (
        asynckv.LookupBuffer("16MiB", drain_s=0) as buffer,
        asynckv.serve("tcp://127.0.0.1:0", lookup=buffer) as server,
        open_rig(server.url, Settings()) as rig,
    ):
        yield rig


@pytest.fixture
def any_left(rig: Rig) -> Callable[[], Awaitable[int]]:
    """Return what says 1 while an entry of any case can be selected, and else 0."""

    async def count() -> int:
        return await rig.lookup.peek(rig.prefix)

    return count


def spread(median: float) -> Spread:
    """Return a spread of a tenth around ``median``."""
    return Spread(median, median * 0.9, median * 1.1)


def baseline(name: str, value: float, ratio: float, a_a: float = 1.0) -> Baseline:
    """Return a baseline; void by its ``a_a``."""
    measured = Measured(spread(value), 0.4, _CALLS, Histogram(_EDGES, (4990, 9, 1)))
    return Baseline(name, measured, spread(ratio), a_a, not 0.85 <= a_a <= 1.15)


def row(case: str, group: Group, unit: Unit, nbytes: int, *beside: Baseline) -> Row:
    """Return a row of one part; void if its first baseline is."""
    subject = Subject(case, f"<{case}>", group, unit, unit not in {"us", "ms"}, nbytes)
    ours = Measured(spread(3.0), 0.45, _CALLS, Histogram(_EDGES, (4800, 190, 10)))
    is_void = beside[0].is_void
    return Row(
        subject,
        "void" if is_void else "ok",
        5,
        ours,
        beside,
        "turns of raw TCP differ by 40%" if is_void else "",
    )


@pytest.fixture
def void_row() -> Row:
    """Return a row whose baseline did not agree with itself."""
    noisy = baseline("raw TCP", 3.5, 0.86, 1.4)
    return row("noisy", "throughput", "GB/s", 2**20, noisy)


@pytest.fixture
def sample_report(void_row: Row) -> BenchReport:
    """Return a report with a row of each kind."""
    raw, copied = baseline("raw TCP", 3.3, 0.91), baseline("memcpy", 16.0, 0.19)
    lost = Subject("lost", "<lost>", "rate", "pairs/s", True, 64)
    rows = (
        row("entry", "throughput", "GB/s", 2**26, raw, copied),
        void_row,
        row(
            "many",
            "concurrency",
            "requests/s",
            2**14,
            baseline("bare asyncio streams", 9e3, 0.6),
        ),
        row("lag", "lag", "ms", 2**26, baseline("idle loop", 0.3, 9.0)),
        Row(lost, "failed", reason="PeerLost: the peer is gone"),
    )
    return BenchReport(
        format=FORMAT,
        version="0.1.0",
        began="2026-11-21T12:00:00+00:00",
        seconds=100.0,
        quick=False,
        own_server=True,
        scheme="tcp",
        transport="inline",
        digest="auto",
        lanes=2,
        machine=Machine("Linux 6", "a <CPU>", 2, 0.2, "3.11", "2.13", "asyncio"),
        rows=rows,
    )
