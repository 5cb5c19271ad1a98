"""How the bench writes its figures, the same in the terminal and on the page."""

from __future__ import annotations

from typing import Final

from asynckv.cli.bench.report import Baseline, BenchReport, Row, Spread, Subject

__all__ = (
    "speedup_of",
    "write_comparison",
    "write_cpu",
    "write_direction",
    "write_duration",
    "write_facts",
    "write_nbytes",
    "write_number",
    "write_spread",
    "write_summary",
    "write_value",
    "write_verdict",
    "write_void",
)

_STEADY: Final = 1.05
"""A smaller factor is no difference."""
_SPEED: Final = ("faster", "slower", "fast")
_DIRECTIONS: Final = {
    "tail": ("shorter", "longer", "long"),
    "lag": ("less late", "later", "late"),
}
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


def write_value(row: Row, *, in_short: bool = False) -> str:
    """Write what asynckv reached, with its unit; nothing for a row that failed.

    ``in_short`` it is the median alone.
    """
    if row.ours is None:
        return ""
    value = row.ours.value
    words = write_number(value.median) if in_short else write_spread(value)
    return f"{words} {row.subject.unit}"


def speedup_of(subject: Subject, baseline: Baseline) -> Spread:
    """Return how much better asynckv is than a baseline: below 1 it is worse."""
    ratio = baseline.ratio
    if subject.higher_is_better:
        return ratio
    low, middle, high = (
        1 / max(one, 1e-12) for one in (ratio.most, ratio.median, ratio.least)
    )
    return Spread(middle, low, high)


def write_direction(subject: Subject, baseline: Baseline) -> str:
    """Write how asynckv compares with a baseline, in the median."""
    factor = speedup_of(subject, baseline).median
    than = "as" if _is_equal(factor) else "than"
    return f"{_words(subject, factor)} {than} {baseline.name}"


def write_comparison(subject: Subject, baseline: Baseline) -> str:
    """Write the same with its spread, and whether the baseline is one.

    >>> from asynckv.cli.bench.report import Measured
    >>> ping = Subject("ping", "ping", "latency", "us", False, 64)
    >>> one = Measured(Spread(20, 19, 21))
    >>> write_comparison(ping, Baseline("a ping", one, Spread(28, 25, 31), 1.0, False))
    '28 times slower than a ping [25-31]'
    """
    speedup = speedup_of(subject, baseline)
    ends = speedup.least, speedup.most
    if min(ends) < 1 < max(ends) or any(map(_is_equal, (*ends, speedup.median))):
        spread = " to ".join(_words(subject, end) for end in ends)
    else:
        least, most = sorted(max(end, 1 / end) for end in ends)
        spread = f"{_times(least)}-{_times(most)}"
    found = f"{write_direction(subject, baseline)} [{spread}]"
    if baseline.is_void:
        found += f" (void: its turns differ by {_off(baseline):.0%})"
    return found


def write_void(baseline: Baseline) -> str:
    """Write by how much a baseline did not agree with itself."""
    return f"turns of {baseline.name} differ by {_off(baseline):.0%}"


def _off(baseline: Baseline) -> float:
    return max(baseline.a_a, 1 / baseline.a_a) - 1


def _words(subject: Subject, factor: float) -> str:
    better, worse, equal = _DIRECTIONS.get(subject.group, _SPEED)
    if _is_equal(factor):
        return f"as {equal}"
    return f"{_times(factor)} times {better if factor >= 1 else worse}"


def _is_equal(factor: float) -> bool:
    return 1 / _STEADY < factor < _STEADY


def _times(factor: float) -> str:
    factor = max(factor, 1 / max(factor, 1e-12))
    return f"{factor:,.0f}" if factor >= 9.95 else f"{factor:.1f}"


def write_cpu(row: Row) -> str:
    """Write CPU seconds a GB, the first baseline's beside asynckv's, if both moved."""
    ours = row.ours.cpu_s_per_gb if row.ours is not None else None
    for first in row.baselines[:1]:
        theirs = first.measured.cpu_s_per_gb
        if ours is not None and theirs is not None:
            return f"CPU: {ours:.2f} s a GB; {first.name}: {theirs:.2f} s"
    return ""


def write_facts(report: BenchReport) -> str:
    """Write when it was, over which link, and where the measuring side ran."""
    where = "to a process of this machine" if report.own_server else "to a given URL"
    machine = report.machine
    return (
        f"asynckv {report.version} · {report.began} · {where} · {report.scheme}, "
        f"{report.transport}, digest {report.digest}, lanes {report.lanes} · "
        f"{machine.processor}, {machine.cores} cores, load {machine.load_before:.1f}"
        f" before · {machine.system} · Python {machine.python}, torch {machine.torch}"
    )


def write_summary(report: BenchReport) -> str:
    """Write how many rows count, and how many do not."""
    verdicts = [row.verdict for row in report.rows]
    void = f"{verdicts.count('void')} void (do not quote these)"
    counts = f"{verdicts.count('ok')} ok, {void}"
    alone = "" if report.is_bench else "; no raw TCP beside it: the server is no bench"
    quick = "; quick: these figures say little" if report.quick else ""
    return f"{counts}, {verdicts.count('failed')} failed{alone}{quick}"


def write_verdict(row: Row) -> str:
    """Write in one line whether the row counts, and why not."""
    if row.verdict == "ok":
        return "ok"
    return f"{row.verdict.upper()}: {row.reason}"


def write_duration(seconds: float) -> str:
    """Write about how long something takes.

    >>> write_duration(0.4), write_duration(41), write_duration(250)
    ('1 s', '40 s', '4 minutes')
    """
    if seconds >= 100:
        return f"{seconds / 60:.0f} minutes"
    return f"{max(1, round(seconds, -1) if seconds > 20 else round(seconds)):.0f} s"
