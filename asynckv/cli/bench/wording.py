"""How the bench writes its figures, the same in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from asynckv.cli.bench.figures import Spread
from asynckv.cli.bench.report import Baseline, BenchReport, Row

__all__ = (
    "write_baseline",
    "write_bin",
    "write_cpu",
    "write_machine",
    "write_nbytes",
    "write_number",
    "write_run",
    "write_spread",
    "write_summary",
    "write_value",
    "write_verdict",
)

_STEADY: Final = 0.15
_UNITS: Final = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def write_nbytes(nbytes: int) -> str:
    """Write a number of bytes in the largest unit in which it is at least 1.

    >>> write_nbytes(64), write_nbytes(18 * 2**10), write_nbytes(2**30)
    ('64 bytes', '18 KiB', '1 GiB')
    """
    for size, unit in _UNITS:
        if nbytes >= size:
            return f"{nbytes / size:g} {unit}"
    return f"{nbytes} bytes"


def write_number(value: float) -> str:
    """Write three digits, or all that are before the point.

    >>> write_number(0.04321), write_number(3.14159), write_number(12345.6)
    ('0.0432', '3.14', '12,346')
    """
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def write_spread(spread: Spread) -> str:
    """Write the median, and the least and the most beside it."""
    least, most = write_number(spread.least), write_number(spread.most)
    return f"{write_number(spread.median)} [{least}-{most}]"


def write_value(row: Row) -> str:
    """Write what asynckv reached, with its unit; nothing for a row that failed."""
    if row.ours is None:
        return ""
    return f"{write_spread(row.ours.value)} {row.subject.unit}"


def write_baseline(baseline: Baseline) -> str:
    """Write asynckv's value in those of a baseline, and whether that is one.

    >>> from asynckv.cli.bench.report import Measured
    >>> one = Spread(0.5, 0.4, 0.6)
    >>> write_baseline(Baseline("memcpy", Measured(one), one, 1.3, True))
    '0.5 [0.4-0.6] × memcpy (A/A 1.300: VOID)'
    """
    a_a = f"A/A {baseline.a_a:.3f}{': VOID' if baseline.is_void else ''}"
    if abs(baseline.second_turn - 1) > _STEADY:
        a_a += f"; second turns {baseline.second_turn:.2f} of first ones"
    return f"{write_spread(baseline.ratio)} × {baseline.name} ({a_a})"


def write_cpu(row: Row) -> str:
    """Write CPU seconds a GB, the first baseline's beside asynckv's, if both moved."""
    if row.ours is None or row.ours.cpu_s_per_gb is None:
        return ""
    theirs = row.baselines[0].measured.cpu_s_per_gb if row.baselines else None
    if theirs is None:
        return ""
    return f"{row.ours.cpu_s_per_gb:.2f} CPU s/GB, {row.baselines[0].name} {theirs:.2f}"


def write_run(report: BenchReport) -> str:
    """Write when it was, and over which link."""
    where = "to a process of this machine" if report.own_server else "to a given URL"
    return (
        f"asynckv {report.version} · {report.began} · {where} · {report.scheme}, "
        f"{report.transport}, digest {report.digest}, lanes {report.lanes}"
    )


def write_machine(report: BenchReport) -> str:
    """Write where the measuring side ran."""
    machine = report.machine
    return (
        f"{machine.processor}, {machine.cores} cores, load {machine.load_before:.1f}"
        f" before · {machine.system} · Python {machine.python}, torch {machine.torch}"
    )


def write_bin(edges: Sequence[float], index: int) -> str:
    """Write where a bin of a histogram begins and ends; the last one is open.

    >>> write_bin((0.0, 0.5, 1000.0), 0), write_bin((0.0, 0.5, 1000.0), 1)
    ('0-0.5', '0.5+')
    """
    if index == len(edges) - 2:
        return f"{edges[index]:g}+"
    return f"{edges[index]:g}-{edges[index + 1]:g}"


def write_summary(report: BenchReport) -> str:
    """Write how many rows count, and how many do not."""
    verdicts = [row.verdict for row in report.rows]
    counts = f"{verdicts.count('ok')} ok, {verdicts.count('void')} void"
    quick = "; quick: these figures say little" if report.quick else ""
    return f"{counts}, {verdicts.count('failed')} failed{quick}"


def write_verdict(row: Row) -> str:
    """Write in one line whether the row counts, and why not."""
    if row.verdict == "ok":
        return "ok"
    return f"{row.verdict.upper()}: {row.reason}"
