"""The demo in the terminal: one line an act while it runs, one table at the end."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asynckv.cli.demo.messages import Computed, Doing, Landed, Progress, Sampled
from asynckv.cli.demo.report import (
    Bar,
    DemoReport,
    figures_of,
    first_token_bars,
    second_request_bars,
    write_bytes,
    write_fall,
    write_seconds,
)

__all__ = ("LiveDisplay", "final_table")

_REFRESH_PER_SECOND = 12
_BAR_WIDTH = 30
_STAGES = ("blue", "yellow", "green")


@dataclasses.dataclass
class _Act:
    """One act as the display shows it."""

    title: str
    began_s: float = dataclasses.field(default_factory=time.monotonic)
    outcome: str | None = None
    took_s: float = 0.0
    computed: int = 0
    landed: int = 0
    sampled: Sampled | None = None
    doing: Doing | None = None


class LiveDisplay:
    """Shows the acts as they go on. Used as a context manager.

    Where the output is no terminal it prints one line an act instead.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._acts: list[_Act] = []
        self._layers = 1
        self._live = Live(
            console=console,
            get_renderable=self._render,
            refresh_per_second=_REFRESH_PER_SECOND,
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def expect_layers(self, layers: int) -> None:
        """Learn how many layers a hand-over has."""
        self._layers = max(1, layers)

    def begin(self, title: str) -> None:
        """Show that an act has begun."""
        self._acts.append(_Act(title))

    def doing(self, what: str) -> None:
        """Show what is done in the act that began last, until it is something else."""
        self.note(Doing(what))

    def end(self, outcome: str) -> None:
        """Show what came of the act that began last."""
        act = self._acts[-1]
        act.outcome, act.took_s = outcome, time.monotonic() - act.began_s
        if not self._console.is_terminal:
            line = f"{act.title}: {outcome}  ({write_seconds(act.took_s)})"
            self._console.print(line, highlight=False)

    def note(self, progress: Progress) -> None:
        """Show progress of the act that began last."""
        act = self._acts[-1] if self._acts else None
        if act is None:
            return
        match progress:
            case Computed(layer):
                act.doing, act.computed = None, max(act.computed, layer + 1)
            case Landed(layer):
                act.doing, act.landed = None, max(act.landed, layer + 1)
            case Doing():
                act.doing = progress
            case Sampled():
                act.sampled = progress

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 2))
        for act in self._acts:
            done = act.outcome is not None
            took_s = act.took_s if done else time.monotonic() - act.began_s
            table.add_row(
                Text("✓" if done else "▸", style="green" if done else "cyan"),
                Text(act.title),
                Text(act.outcome or "") if done else self._progress_of(act),
                Text(write_seconds(took_s), style="dim"),
            )
        return Group(table)

    def _progress_of(self, act: _Act) -> Table:
        grid = Table.grid(padding=(0, 1))
        if act.sampled is not None:
            sample, bound = act.sampled.sample, act.sampled.max_bytes
            bar = ProgressBar(total=bound, completed=sample.buffered_bytes, width=24)
            words = f"{write_bytes(sample.buffered_bytes)} of {write_bytes(bound)}"
            grid.add_row("buffer", bar, f"{words}, {sample.waiting} inserts wait")
            return grid
        doing = act.doing
        if doing is not None and doing.total:
            bar = ProgressBar(total=doing.total, completed=doing.done, width=24)
            grid.add_row(doing.what, bar, f"{doing.done}/{doing.total}")
        elif doing is not None:
            grid.add_row(doing.what)
        elif act.computed or act.landed:
            for name, layers in (("computed", act.computed), ("arrived", act.landed)):
                bar = ProgressBar(total=self._layers, completed=layers, width=24)
                grid.add_row(f"{name}: layer", bar, f"{layers}/{self._layers}")
        return grid


def final_table(report: DemoReport) -> Group:
    """Return the numbers, the generated text and what went wrong, to be printed."""
    table = _table()
    for figure in figures_of(report):
        table.add_row(*figure)
    text = Panel(Text(report.text), title="the decoder wrote", title_align="left")
    problems = [Text(f"problem: {problem}", "bold red") for problem in report.problems]
    return Group(
        Text("\ntime to first token, from the request", "bold"),
        _bars(first_token_bars(report)),
        Text("\na second request on the same document", "bold"),
        _bars(second_request_bars(report.second)),
        Text(f"{write_fall(report.second)}\n"),
        table,
        text,
        *problems,
    )


def _table() -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(justify="left")
    table.add_column(justify="right", style="bold", no_wrap=True)
    table.add_column(style="dim")
    return table


def _bars(bars: Sequence[Bar]) -> Table:
    longest_s = max(sum(bar.stages_s) for bar in bars)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="bold", justify="right", no_wrap=True)
    table.add_column(style="dim")
    for bar in bars:
        cells, drawn, ends_s = Text(), 0, 0.0
        for seconds, style in zip(bar.stages_s, _STAGES, strict=True):
            ends_s += seconds
            width = round(_BAR_WIDTH * ends_s / longest_s) - drawn
            cells.append("█" * width, style=style)
            drawn += width
        first_s = write_seconds(sum(bar.stages_s))
        table.add_row(bar.name, cells, first_s, bar.remark)
    return table
