"""Which cases there are, in which order, what they are called; and one run of them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import fnmatch
import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import torch

from asynckv import __version__
from asynckv.cli.bench.baselines import MAX_NBYTES, MAX_PARTS, PING_NBYTES
from asynckv.cli.bench.cases import (
    open_fetching,
    open_lag,
    open_moving,
    open_outstanding,
    open_pairs,
    open_ping,
    open_tail,
)
from asynckv.cli.bench.report import FORMAT, BenchReport, Group, Machine, Row, Subject
from asynckv.cli.bench.rig import Rig, WrongBytes, open_rig
from asynckv.cli.bench.rounds import Case, failed_row, judge, measure
from asynckv.cli.bench.server import own_server
from asynckv.cli.bench.settings import Scale, Selection, Settings
from asynckv.cli.bench.wording import write_nbytes
from asynckv.cli.process import processor
from asynckv.errors import AsyncKVError, ConfigError
from asynckv.links.address import parse_url
from asynckv.links.options import cores
from asynckv.types import parse_bytes

__all__ = (
    "Exhibit",
    "Progress",
    "catalogue",
    "choose",
    "read_shape",
    "run_bench",
    "run_case",
)


_REQUEST_NBYTES = 16 * 2**10
_FETCH_NBYTES = 2 * 2**20
_MAX_REPEATS = 100
_MAX_TENSORS = 4096
_MOST_FOR_ANY = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class Exhibit:
    """A subject and how to open its case."""

    subject: Subject
    open: Callable[[Rig], AbstractAsyncContextManager[Case]]


def catalogue(scale: Scale) -> list[Exhibit]:
    """Return every case at that scale; names do not depend on it."""
    return [
        *_entries(scale),
        *_blocks(scale),
        *_latencies(scale),
        *(_outstanding(scale, n) for n in scale.outstanding),
        *_waits(scale),
    ]


def choose(selection: Selection, *, is_bench: bool = True) -> list[Exhibit]:
    """Return the cases that were chosen; of a server that is no bench, what it can do.

    :raises ConfigError: a name fits no case
    """
    scale = selection.scale
    known = [one for one in catalogue(scale) if is_bench or _suits_any_server(one)]
    found = [] if selection.shapes and not selection.cases else known
    if selection.cases:
        names = [one.subject.case for one in known]
        wanted = {name for case in selection.cases for name in _fitting(case, names)}
        found = [one for one in known if one.subject.case in wanted]
    for parts, nbytes in selection.shapes:
        title = f"{parts:,} {'tensor' if parts == 1 else 'tensors'} of "
        name = f"shape-{parts}x{nbytes}"
        shape = (parts, nbytes)
        title += write_nbytes(nbytes)
        found.append(_moving(scale, name, title, "throughput", shape))
    return found


def _suits_any_server(exhibit: Exhibit) -> bool:
    """Whether it needs little room, and no sockets of a bench."""
    subject = exhibit.subject
    return subject.parts * subject.part_nbytes <= _MOST_FOR_ANY and subject.group in (
        *("throughput", "blocks", "latency", "concurrency", "rate"),
    )


def _fitting(case: str, names: list[str]) -> list[str]:
    pattern = case
    kind, _, size = case.rpartition("-")
    if kind and size:  # entry-1MiB is entry-1048576
        with contextlib.suppress(ValueError):
            pattern = f"{kind}-{parse_bytes(size)}"
    if found := fnmatch.filter(names, pattern):
        return found
    raise ConfigError(f"no case fits {case!r}", hint=f"there are {', '.join(names)}")


def read_shape(text: str) -> tuple[int, int]:
    """Return tensors and bytes of each, of ``"32x2MiB"``.

    :raises ConfigError: it is no shape
    """
    parts, _, size = text.lower().partition("x")
    try:
        shape = int(parts), parse_bytes(size)
    except ValueError as exc:
        hint = "write how many tensors of how many bytes, as 32x2MiB"
        raise ConfigError(f"{text!r} is no shape", hint=hint) from exc
    if min(shape) < 1 or shape[0] > MAX_PARTS or shape[1] > MAX_NBYTES:
        hint = f"up to {MAX_PARTS:,} tensors of up to {write_nbytes(MAX_NBYTES)}"
        raise ConfigError(f"{text!r} cannot be measured", hint=hint)
    return shape


def _moving(
    scale: Scale,
    case: str,
    title: str,
    group: Group,
    shape: tuple[int, int],
    *,
    scattered: bool = False,
) -> Exhibit:
    parts, nbytes = shape
    subject = Subject(case, title, group, "GB/s", True, nbytes, parts)
    repeats = _repeats(scale, parts, nbytes)
    return Exhibit(
        subject,
        lambda rig: open_moving(rig, subject, repeats=repeats, scattered=scattered),
    )


def _repeats(scale: Scale, parts: int, nbytes: int) -> int:
    """How often to transfer in one measurement, so that it takes long enough."""
    enough = scale.repeat_to // (parts * nbytes)
    return max(1, min(enough, _MAX_REPEATS, _MAX_TENSORS // parts))


def _entries(scale: Scale) -> list[Exhibit]:
    sized = [
        _moving(
            scale,
            f"entry-{nbytes}",
            f"{write_nbytes(nbytes)} entry",
            "throughput",
            (1, nbytes),
        )
        for nbytes in (*scale.sizes, scale.entry)
    ]
    parts, nbytes = scale.layers
    total = write_nbytes(parts * nbytes)
    title = f"{total} as {parts} layers of {write_nbytes(nbytes)}"
    return [*sized, _moving(scale, "layers", title, "throughput", scale.layers)]


def _blocks(scale: Scale) -> list[Exhibit]:
    parts, nbytes = scale.small
    title = f"{parts:,} tensors of {write_nbytes(nbytes)}"
    found = [_moving(scale, "small", title, "blocks", scale.small)]
    for nbytes in scale.scattered_nbytes:
        shape = (max(1, scale.scattered_total // nbytes), nbytes)
        title = f"{shape[0]:,} scattered blocks of {write_nbytes(nbytes)}"
        name = f"scattered-{nbytes}"
        found.append(_moving(scale, name, title, "blocks", shape, scattered=True))
    return found


def _latencies(scale: Scale) -> list[Exhibit]:
    ping = Subject(
        "ping",
        f"{PING_NBYTES}-byte drop_select, round trip",
        "latency",
        "us",
        False,
        PING_NBYTES,
    )
    fetch = Subject(
        "fetch",
        f"{write_nbytes(_FETCH_NBYTES)} fetch",
        "latency",
        "us",
        False,
        _FETCH_NBYTES,
    )
    return [
        Exhibit(ping, lambda rig: open_ping(rig, ping, scale.pings)),
        Exhibit(fetch, lambda rig: open_fetching(rig, fetch, scale.fetches)),
    ]


def _outstanding(scale: Scale, outstanding: int) -> Exhibit:
    subject = Subject(
        f"outstanding-{outstanding}",
        f"{write_nbytes(_REQUEST_NBYTES)} requests, {outstanding:,} outstanding",
        "concurrency",
        "requests/s",
        True,
        _REQUEST_NBYTES,
        outstanding=outstanding,
    )
    return Exhibit(subject, lambda rig: open_outstanding(rig, subject, scale.requests))


def _waits(scale: Scale) -> list[Exhibit]:
    parts, nbytes = scale.tail
    tail = Subject(
        "tail",
        f"layer-wise tail of {parts} layers of {write_nbytes(nbytes)}",
        "tail",
        "ms",
        False,
        nbytes,
        parts,
    )
    pairs = Subject(
        "pairs",
        f"insert and drop_select of {PING_NBYTES} bytes, in turns",
        "rate",
        "pairs/s",
        True,
        PING_NBYTES,
    )
    lag = Subject(
        "lag",
        f"loop lag p99 while entries of {write_nbytes(scale.entry)} move",
        "lag",
        "ms",
        False,
        scale.entry // 4,
        4,
    )
    return [
        Exhibit(tail, lambda rig: open_tail(rig, tail, scale.compute_s)),
        Exhibit(pairs, lambda rig: open_pairs(rig, pairs, scale.pairs)),
        Exhibit(lag, lambda rig: open_lag(rig, lag, scale.ticks)),
    ]


_PATIENCE_S = 120.0
_FAILURES = (AsyncKVError, OSError, EOFError, ValueError, MemoryError, WrongBytes)


class Progress(Protocol):
    """Is told how the run goes on. Called between measurements only."""

    def expect(self, cases: int, about_s: float, quick_s: float) -> None:
        """So many cases will be measured, in about so long; quickly in so long."""

    def begin(self, title: str, steps: int) -> None:
        """A case begins: so many rounds, or seconds."""

    def advance(self, steps: int) -> None:
        """So many of its steps are over."""

    def end(self, row: Row) -> None:
        """It is over."""


async def run_bench(
    url: str | None, settings: Settings, progress: Progress, selection: Selection
) -> BenchReport:
    """Measure cases against ``url``, or a server process of our own.

    A case that fails is a row that says why. A cancelled call leaves no process.
    Against a server that is no bench (any that serves a lookup buffer) there are no
    baselines that need its help, and fewer cases.

    :raises ConfigError: no such case, or what serves at ``url`` has no lookup buffer
    :raises PeerLost: nothing answers there
    :raises ServerEnded: our own server could not serve
    """
    choose(selection)  # a name that fits nothing is said before anything starts
    began, began_s = datetime.datetime.now(datetime.UTC), time.monotonic()
    machine = _machine()
    async with contextlib.AsyncExitStack() as stack:
        address = url
        if address is None:
            address = await stack.enter_async_context(own_server(settings))
        rig = await stack.enter_async_context(open_rig(address, settings))
        exhibits = choose(selection, is_bench=rig.is_bench)
        about_s = (
            selection.about_s(len(exhibits)),
            Selection(quick=True).about_s(len(exhibits)),
        )
        progress.expect(len(exhibits), *about_s)
        rows = [await run_case(rig, one, selection, progress) for one in exhibits]
        transport = rig.peer.transport
    return BenchReport(
        format=FORMAT,
        version=__version__,
        began=began.isoformat(timespec="seconds"),
        seconds=time.monotonic() - began_s,
        quick=selection.quick,
        own_server=url is None,
        scheme=parse_url(address).scheme,
        transport=transport,
        digest=settings.digest,
        lanes=rig.lanes,
        machine=machine,
        rows=tuple(rows),
        is_bench=rig.is_bench,
    )


async def run_case(
    rig: Rig, exhibit: Exhibit, selection: Selection, progress: Progress
) -> Row:
    """Measure one case and return its row, also where that fails.

    A server that is no bench has the time of ``_PATIENCE_S`` more: it may be full.
    """
    subject, seconds = exhibit.subject, selection.seconds
    rounds = selection.scale.rounds
    progress.begin(subject.title, rounds + 1 if seconds is None else int(seconds))
    deadline_s = None if rig.is_bench else _PATIENCE_S + (seconds or 0)
    try:
        async with asyncio.timeout(deadline_s), exhibit.open(rig) as case:
            found = await measure(
                case, rounds, rig.cpu_s, progress.advance, seconds=seconds
            )
        row = judge(subject, found, case.edges)
    except* TimeoutError:
        reason = f"not over after {deadline_s:.0f} s: has that server room?"
        row = failed_row(subject, reason)
    except* _FAILURES as failures:
        row = failed_row(subject, _first_words(failures))
    progress.end(row)
    return row


def _first_words(failures: BaseExceptionGroup[Exception]) -> str:
    failure: BaseException = failures
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return f"{type(failure).__name__}: {failure}"


def _machine() -> Machine:
    loop = type(asyncio.get_running_loop())
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        processor=processor(),
        cores=cores(),
        load_before=os.getloadavg()[0],
        python=sys.version.split()[0],
        torch=str(torch.__version__),
        loop=f"{loop.__module__}.{loop.__qualname__}",
    )
