"""One run of the bench: every case in turn, and what is said about the machine."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import platform
import sys
import time
from typing import Protocol

import torch

from asynckv import __version__
from asynckv.cli.bench.catalogue import Exhibit, choose
from asynckv.cli.bench.judging import failed_row, judge
from asynckv.cli.bench.measuring import measure
from asynckv.cli.bench.memory import WrongBytes
from asynckv.cli.bench.report import FORMAT, BenchReport, Machine, Row
from asynckv.cli.bench.rig import Rig, open_rig
from asynckv.cli.bench.server import own_server
from asynckv.cli.bench.settings import Selection, Settings
from asynckv.cli.host import processor
from asynckv.errors import AsyncKVError
from asynckv.links.address import parse_url
from asynckv.links.options import cores

__all__ = ("Progress", "run_bench", "run_case")

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
