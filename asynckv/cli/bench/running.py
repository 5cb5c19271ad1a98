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
from asynckv.cli.bench.catalogue import Exhibit, catalogue
from asynckv.cli.bench.judging import failed_row, judge
from asynckv.cli.bench.measuring import measure
from asynckv.cli.bench.memory import WrongBytes
from asynckv.cli.bench.report import FORMAT, BenchReport, Machine, Row
from asynckv.cli.bench.rig import Rig, open_rig
from asynckv.cli.bench.server import own_server
from asynckv.cli.bench.settings import FULL, QUICK, Settings
from asynckv.errors import AsyncKVError
from asynckv.links.address import parse_url
from asynckv.links.dial import cores

__all__ = ("Progress", "run_bench", "run_case")

_FAILURES = (AsyncKVError, OSError, EOFError, ValueError, MemoryError, WrongBytes)


class Progress(Protocol):
    """Is told how the run goes on. Called between measurements only."""

    def expect(self, cases: int) -> None:
        """So many cases will be measured."""

    def begin(self, title: str, rounds: int) -> None:
        """A case begins."""

    def advance(self, rounds: int) -> None:
        """So many of its rounds are over."""

    def end(self, row: Row) -> None:
        """It is over."""


async def run_bench(
    url: str | None, settings: Settings, progress: Progress, *, quick: bool = False
) -> BenchReport:
    """Measure every case against ``url``, or a server process of our own.

    A case that fails is a row that says why. A cancelled call leaves no process.

    :raises ConfigError: what serves at ``url`` is no bench
    :raises PeerLost: nothing answers there
    :raises ServerEnded: our own server could not serve
    """
    scale = QUICK if quick else FULL
    began, began_s = datetime.datetime.now(datetime.UTC), time.monotonic()
    machine = _machine()
    async with contextlib.AsyncExitStack() as stack:
        address = url
        if address is None:
            address = await stack.enter_async_context(own_server(settings))
        rig = await stack.enter_async_context(open_rig(address, settings))
        exhibits = catalogue(scale)
        progress.expect(len(exhibits))
        rows = [await run_case(rig, one, scale.rounds, progress) for one in exhibits]
        transport = rig.peer.transport
    return BenchReport(
        format=FORMAT,
        version=__version__,
        began=began.isoformat(timespec="seconds"),
        seconds=time.monotonic() - began_s,
        quick=quick,
        own_server=url is None,
        scheme=parse_url(address).scheme,
        transport=transport,
        digest=settings.digest,
        lanes=rig.lanes,
        machine=machine,
        rows=tuple(rows),
    )


async def run_case(rig: Rig, exhibit: Exhibit, rounds: int, progress: Progress) -> Row:
    """Measure one case and return its row, also where that fails."""
    subject = exhibit.subject
    progress.begin(subject.title, rounds)
    try:
        async with exhibit.open(rig) as case:
            found = await measure(case, rounds, rig.cpu_s, progress.advance)
        row = judge(subject, found, case.edges)
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
        processor=_processor(),
        cores=cores(),
        load_before=os.getloadavg()[0],
        python=sys.version.split()[0],
        torch=str(torch.__version__),
        loop=f"{loop.__module__}.{loop.__qualname__}",
    )


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
