"""The bench in the terminal: a bar while it runs, a row for each case that is over.

It draws between measurements only, never beside one.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from asynckv.cli.bench.report import Baseline, BenchReport, Row, Subject
from asynckv.cli.bench.wording import (
    speedup_of,
    write_comparison,
    write_cpu,
    write_direction,
    write_duration,
    write_median,
    write_value,
    write_verdict,
)

__all__ = ("BenchDisplay", "closing_table")

_STYLES = {"ok": "green", "void": "yellow", "failed": "bold red"}
_EXPLAINED = (
    "A row is the median of its rounds [least-most], then asynckv beside what was\n"
    "measured in the same rounds. VOID: the machine was too busy; do not quote it.\n"
    "The bare asyncio echo, for what is small, is an asyncio.Protocol with a length,\n"
    "one msgspec frame and one future, on the same loops, in turns of ten with asynckv."
)


class BenchDisplay:
    """Shows how the run goes on. Used as a context manager.

    Where the output is no terminal there is no bar.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(24),
            MofNCompleteColumn(),
            console=console,
            auto_refresh=False,  # its thread would take turns with the event loop
            transient=True,
            disable=not console.is_terminal,
        )
        self._all = self._progress.add_task("cases", total=None)
        self._case = self._progress.add_task("", total=1, visible=False)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def expect(self, cases: int, about_s: float, quick_s: float) -> None:
        """So many cases will be measured, in about so long."""
        some = "1 case" if cases == 1 else f"{cases} cases"
        took = f"{some}, about {write_duration(about_s)} on an idle machine"
        if quick_s < about_s:
            took += f"; --quick takes {write_duration(quick_s)}, --case NAME one case"
        self._console.print(Text(f"{took}.\n{_EXPLAINED}\n"))
        self._progress.update(self._all, total=cases, refresh=True)

    def begin(self, title: str, steps: int) -> None:
        """Show that a case has begun, of so many steps."""
        self._progress.update(
            self._case,
            description=title,
            total=steps,
            completed=0,
            visible=True,
            refresh=True,
        )

    def advance(self, steps: int) -> None:
        """Show how many steps are over."""
        self._progress.update(self._case, completed=steps, refresh=True)

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
            self._console.print(line, soft_wrap=True)
        self._progress.update(self._case, visible=False)
        self._progress.advance(self._all)
        self._progress.refresh()


def closing_table(report: BenchReport) -> Table:
    """Return one line a case, beside its first baseline, to be printed at the end."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("case", "asynckv", "beside", ""):
        table.add_column(name)
    for row in report.rows:
        value = "" if row.ours is None else write_median(row)
        beside = Text()
        if row.baselines:
            first = row.baselines[0]
            words = write_direction(row.subject, first)
            beside.append(words, _style_of(row.subject, first))
        verdict = Text(row.verdict, _STYLES[row.verdict])
        table.add_row(row.subject.title, value, beside, verdict)
    return table


def _style_of(subject: Subject, baseline: Baseline) -> str:
    if baseline.is_void:
        return "yellow"
    return "green" if speedup_of(subject, baseline).median >= 1 else "red"
