"""The bench in the terminal: a bar while it runs, a row for each case that is over.

It draws between measurements only, never beside one.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from asynckv.cli.bench.report import Row
from asynckv.cli.bench.wording import (
    write_baseline,
    write_cpu,
    write_value,
    write_verdict,
)

__all__ = ("BenchDisplay",)

_STYLES = {"ok": "green", "void": "yellow", "failed": "bold red"}


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

    def expect(self, cases: int) -> None:
        """So many cases will be measured."""
        self._progress.update(self._all, total=cases, refresh=True)

    def begin(self, title: str, rounds: int) -> None:
        """Show that a case has begun; the round that is not counted counts here."""
        self._progress.update(
            self._case,
            description=title,
            total=rounds + 1,
            completed=0,
            visible=True,
            refresh=True,
        )

    def advance(self, rounds: int) -> None:
        """Show how many rounds are over."""
        self._progress.update(self._case, completed=rounds, refresh=True)

    def end(self, row: Row) -> None:
        """Print the row, a line for each of its baselines, and go on."""
        verdict = (write_verdict(row), _STYLES[row.verdict])
        title = (row.subject.title, "bold")
        lines = [Text.assemble(title, "  ", write_value(row), "  ", verdict)]
        lines += [Text(f"    {write_baseline(one)}") for one in row.baselines]
        if cpu := write_cpu(row):
            lines.append(Text(f"    {cpu}"))
        for line in lines:
            self._console.print(line, soft_wrap=True)
        self._progress.update(self._case, visible=False)
        self._progress.advance(self._all)
        self._progress.refresh()
