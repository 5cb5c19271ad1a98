"""One run of the bench: the cases that were chosen, and what the terminal shows of it.

The bar is drawn between measurements only, never beside one. A row is printed when its
case is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import fnmatch
import os
import platform
import sys
import time

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from asynckv import __version__
from asynckv.cli.bench.baselines import MAX_NBYTES, MAX_PARTS
from asynckv.cli.bench.cases import Exhibit, case_of_shape, catalogue
from asynckv.cli.bench.report import (
    FORMAT,
    Baseline,
    BenchReport,
    Machine,
    Row,
    Selection,
    Settings,
    Subject,
)
from asynckv.cli.bench.rig import Rig, WrongBytes, open_rig
from asynckv.cli.bench.rounds import ROUNDS, judge, measure
from asynckv.cli.bench.server import own_server
from asynckv.cli.bench.wording import (
    speedup_of,
    write_comparison,
    write_cpu,
    write_direction,
    write_duration,
    write_nbytes,
    write_value,
    write_verdict,
)
from asynckv.cli.process import processor
from asynckv.errors import AsyncKVError, ConfigError
from asynckv.links.address import parse_url
from asynckv.links.options import cores
from asynckv.types import parse_bytes

__all__ = (
    "BenchDisplay",
    "choose",
    "closing_table",
    "read_shape",
    "run_bench",
    "run_case",
    "this_machine",
)


_MOST_FOR_ANY = 64 * 2**20


def choose(selection: Selection, *, is_bench: bool = True) -> list[Exhibit]:
    """Return the cases that were chosen; of a server that is no bench, what it can do.

    :raises ConfigError: a name fits no case, or a shape is none
    """
    quick, cases = selection.quick, selection.cases
    known = catalogue(quick=quick)
    if not is_bench:
        known = [one for one in known if _suits_any_server(one.subject)]
    names = [one.subject.case for one in known]
    if not cases and not selection.shapes:
        cases = ("*",)
    wanted = {name for case in cases for name in _fitting(case, names)}
    shapes = map(read_shape, selection.shapes)
    return [
        *(one for one in known if one.subject.case in wanted),
        *(case_of_shape(shape, quick=quick) for shape in shapes),
    ]


def _suits_any_server(subject: Subject) -> bool:
    """Whether it needs little room, and no sockets of a bench."""
    is_small = subject.parts * subject.part_nbytes <= _MOST_FOR_ANY
    return is_small and subject.group not in ("tail", "lag")


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


_STYLES = {"ok": "green", "void": "yellow", "failed": "bold red"}
_EXPLAINED = (
    "A row is the median of its rounds [least-most], then asynckv beside what was\n"
    "measured in the same rounds. VOID: the machine was too busy; do not quote it.\n"
    "The bare asyncio echo, for what is small, is an asyncio.Protocol with a length,\n"
    "one msgspec frame and one future, on the same loops, in turns of ten with asynckv."
)


class BenchDisplay:
    """Shows how the run goes on.

    Where the output is no terminal there is no bar.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(24),
            MofNCompleteColumn(),
            console=console,
            auto_refresh=False,  # its thread would take turns with the event loop
            transient=True,
            disable=not console.is_terminal,
        )
        self._all = self.progress.add_task("cases", total=None)
        self._case = self.progress.add_task("", total=1, visible=False)

    def expect(self, cases: int, selection: Selection) -> None:
        """So many cases will be measured, which takes about so long."""
        some = "1 case" if cases == 1 else f"{cases} cases"
        about_s = selection.about_s(cases)
        quick_s = Selection(quick=True).about_s(cases)
        took = f"{some}, about {write_duration(about_s)} on an idle machine"
        if quick_s < about_s:
            took += f"; --quick takes {write_duration(quick_s)}, --case NAME one case"
        self.console.print(Text(f"{took}.\n{_EXPLAINED}\n"))
        self.progress.update(self._all, total=cases, refresh=True)

    def begin(self, title: str, steps: int) -> None:
        """Show that a case has begun, of so many steps."""
        self.progress.update(
            self._case,
            description=title,
            total=steps,
            completed=0,
            visible=True,
            refresh=True,
        )

    def advance(self, steps: int) -> None:
        """Show how many steps are over."""
        self.progress.update(self._case, completed=steps, refresh=True)

    def end(self, row: Row) -> None:
        """Print the row, a line for each of its baselines, and go on."""
        verdict = (write_verdict(row), _STYLES[row.verdict])
        title = (row.subject.title, "bold")
        lines = [Text.assemble(title, "  ", write_value(row), "  ", verdict)]
        for one in row.baselines:
            words = f"    {write_comparison(row.subject, one)}"
            lines.append(Text(words, _style_of(row.subject, one)))
        if cpu := write_cpu(row):
            lines.append(Text(f"    {cpu}"))
        for line in lines:
            self.console.print(line, soft_wrap=True)
        self.progress.update(self._case, visible=False)
        self.progress.advance(self._all)
        self.progress.refresh()


def closing_table(report: BenchReport) -> Table:
    """Return one line a case, beside its first baseline, to be printed at the end."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("case", "asynckv", "beside", ""):
        table.add_column(name)
    for row in report.rows:
        beside = [
            Text(write_direction(row.subject, one), _style_of(row.subject, one))
            for one in row.baselines[:1]
        ]
        value = write_value(row, in_short=True)
        verdict = Text(row.verdict, _STYLES[row.verdict])
        table.add_row(row.subject.title, value, *beside or [Text()], verdict)
    return table


def _style_of(subject: Subject, baseline: Baseline) -> str:
    if baseline.is_void:
        return "yellow"
    return "green" if speedup_of(subject, baseline).median >= 1 else "red"


_PATIENCE_S = 120.0
_FAILURES = (AsyncKVError, OSError, EOFError, ValueError, MemoryError, WrongBytes)


async def run_bench(
    url: str | None, settings: Settings, display: BenchDisplay, selection: Selection
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
    machine = this_machine()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(display.progress)
        address = url
        if address is None:
            address = await stack.enter_async_context(own_server(settings))
        rig = await stack.enter_async_context(open_rig(address, settings))
        exhibits = choose(selection, is_bench=rig.is_bench)
        display.expect(len(exhibits), selection)
        rows = [await run_case(rig, one, selection, display) for one in exhibits]
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
    rig: Rig, exhibit: Exhibit, selection: Selection, display: BenchDisplay
) -> Row:
    """Measure one case and return its row, also where that fails.

    A server that is no bench has the time of ``_PATIENCE_S`` more: it may be full.
    """
    subject, seconds = exhibit.subject, selection.seconds
    display.begin(subject.title, ROUNDS + 1 if seconds is None else int(seconds))
    deadline_s = None if rig.is_bench else _PATIENCE_S + (seconds or 0)
    try:
        async with asyncio.timeout(deadline_s), exhibit.open(rig) as case:
            found = await measure(case, ROUNDS, display.advance, seconds=seconds)
        row = judge(subject, found, case.edges)
    except* TimeoutError:
        reason = f"not over after {deadline_s:.0f} s: has that server room?"
        row = Row(subject, "failed", reason=reason)
    except* _FAILURES as failures:
        row = Row(subject, "failed", reason=_first_words(failures))
    display.end(row)
    return row


def _first_words(failures: BaseExceptionGroup[Exception]) -> str:
    failure: BaseException = failures
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return f"{type(failure).__name__}: {failure}"


def this_machine() -> Machine:
    """Return where this process runs, and on which loop."""
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
