"""The report's plots as one PNG, drawn by matplotlib where that is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from asynckv.cli.bench.page import (
    Bars,
    Line,
    lag_bars,
    latency_lines,
    throughput_lines,
)
from asynckv.cli.bench.wording import (
    write_bin,
    write_machine,
    write_nbytes,
    write_number,
    write_run,
    write_summary,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from asynckv.cli.bench.report import BenchReport

__all__ = ("can_draw", "draw_picture")

_COLOURS: Final = {"ours": "#4c78a8", "raw": "#c2701c", "copy": "#7a828e"}
_INK: Final = "#1d2127"
_SOFT: Final = "#626a75"
_GRID: Final = "#e3e3de"
_SIZE_INCHES: Final = (10.2, 12.4)
_DPI: Final = 110


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_picture(report: BenchReport, path: Path) -> None:
    """Draw the plots of ``report`` into ``path``. Opens no window.

    :raises ImportError: matplotlib is not installed
    """
    from matplotlib.figure import Figure

    figure = Figure(_SIZE_INCHES, dpi=_DPI, layout="constrained")
    figure.suptitle(
        f"asynckv bench: {write_summary(report)}\n"
        f"{write_run(report)}\n{write_machine(report)}",
        fontsize=9,
        color=_INK,
    )
    size, outstanding, late = figure.subplots(3)
    _draw_lines(size, throughput_lines(report), "GB/s", lambda x: write_nbytes(int(x)))
    size.set_xlabel("bytes of an entry (log scale)")
    size.set_title("Throughput against size", loc="left", fontsize=11)
    _draw_lines(outstanding, latency_lines(report), "ms", lambda x: f"{x:,.0f}")
    outstanding.set_xlabel("requests outstanding (log scale)")
    outstanding.set_title(
        "Latency against outstanding requests", loc="left", fontsize=11
    )
    _draw_bars(late, lag_bars(report))
    late.set_title("Loop lag: how late a ticker of 1 ms came", loc="left", fontsize=11)
    figure.savefig(path, format="png")


def _draw_lines(
    axes: Axes, lines: Sequence[Line], unit: str, write_x: Callable[[float], str]
) -> None:
    places = sorted({point.x for line in lines for point in line.points})
    if not places:
        _say_nothing_drawn(axes)
        return
    axes.set_xscale("log")
    axes.set_yscale("log")
    for line in lines:
        _draw_line(axes, line)
    axes.set_xticks(places, [write_x(place) for place in places])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter(lambda value, _: write_number(value))
    axes.set_ylabel(f"{unit} (log scale)")
    _finish(axes)


def _draw_line(axes: Axes, line: Line) -> None:
    kind, *is_thin = line.kind.split()
    colour = _COLOURS[kind]
    x = [point.x for point in line.points]
    y = [point.value.median for point in line.points]
    axes.plot(x, y, "--" if is_thin else "-", color=colour, label=line.name)
    for point in line.points:
        value = point.value
        axes.plot([point.x] * 2, [value.least, value.most], color=colour, alpha=0.5)
        face = colour if point.is_sure else "white"
        axes.plot(point.x, value.median, "o", color=colour, markerfacecolor=face)


def _draw_bars(axes: Axes, all_bars: Sequence[Bars]) -> None:
    if not all_bars:
        _say_nothing_drawn(axes)
        return
    edges = all_bars[0].histogram.edges
    width = 0.8 / len(all_bars)
    for number, bars in enumerate(all_bars):
        counts = bars.histogram.counts
        total = max(sum(counts), 1)
        places = [index - 0.4 + (number + 0.5) * width for index in range(len(counts))]
        shares = [100 * count / total for count in counts]
        axes.bar(places, shares, width, color=_COLOURS[bars.kind], label=bars.name)
    names = [write_bin(edges, index) for index in range(len(edges) - 1)]
    axes.set_xticks(range(len(names)), names)
    axes.set_xlabel("ms late")
    axes.set_ylabel("% of all ticks")
    _finish(axes)


def _say_nothing_drawn(axes: Axes) -> None:
    axes.set_axis_off()
    words = "Nothing was measured that could be drawn here."
    axes.text(0.5, 0.5, words, ha="center", color=_SOFT)


def _finish(axes: Axes) -> None:
    axes.grid(axis="y", color=_GRID)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_SOFT, labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    # A place of its own: matplotlib takes its time to find the best one.
    axes.legend(
        loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False, fontsize=8
    )
