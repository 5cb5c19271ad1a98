"""What was measured of one peer: rows as those of ``asynckv bench``, and as Markdown.

Every ratio is taken round by round, and is one of speeds: above 1 the first is faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from asynckv.cli.bench.report import (
    Machine,
    Measured,
    Percentiles,
    Row,
    Spread,
    Subject,
)
from asynckv.cli.bench.rounds import Round, Sample, judge
from asynckv.cli.bench.wording import speedup_of, write_number, write_spread

__all__ = (
    "FULL",
    "MEMCPY",
    "OFF",
    "PEER",
    "RAW",
    "PeerReport",
    "rows_of",
    "write_report",
    "write_summary",
)

OFF: Final = "asynckv off"
FULL: Final = "asynckv full"
PEER: Final = "peer"
RAW: Final = "raw TCP"
MEMCPY: Final = "memcpy"
_HEAD: Final = (
    "work",
    *("off / peer", "full / peer", "off / raw", "peer / raw", "A/A"),
    *("off", "peer", "raw", "memcpy", "CPU s/GB off, full, peer, raw"),
)


class PeerReport(msgspec.Struct, frozen=True):
    """Everything one run measured of one peer, or why it measured nothing more.

    ``rows`` are of asynckv without digests and with them, and of the peer, beside the
    others: one for each work, by their names. ``lags`` are milliseconds by which a
    ticker of 1 ms was late, while layers move back to back; of whom blocks, its thread
    does. ``idle_cpu`` is the share of a core that the peer's processes take while
    nobody asks.
    """

    peer: str
    how: str = ""
    reason: str = ""
    versions: Mapping[str, str] = {}
    began: str = ""
    seconds: float = 0.0
    quick: bool = False
    machine: Machine | None = None
    ours: str = ""
    rows: tuple[Mapping[str, Row], ...] = ()
    lags: Mapping[str, Percentiles] = {}
    idle_cpu: float | None = None


def rows_of(subject: Subject, rounds: Sequence[Round]) -> Mapping[str, Row]:
    """Return what the rounds add up to: asynckv without digests is theirs.

    They have all others beside it, and raw TCP as the first.
    """
    others = {one: judge(subject, _seen_from(one, rounds)) for one in (FULL, PEER)}
    return {OFF: judge(subject, rounds), **others}


def _seen_from(name: str, rounds: Sequence[Round]) -> list[Round]:
    """Return the same with the mean of both turns of one baseline in the middle."""
    seen = []
    for one in rounds:
        beside = dict(one.baselines)
        first, second = beside.pop(name)
        mean = Sample(
            (first.value + second.value) / 2,
            first.nbytes + second.nbytes,
            cpu_s=first.cpu_s + second.cpu_s,
        )
        seen.append(Round(mean, beside))
    return seen


def write_report(report: PeerReport) -> str:
    """Return everything about one peer: ratios of speeds, then figures."""
    about = [
        f"### {report.peer}",
        "",
        f"{report.how or 'not measured'}."
        + "".join(f" {name} {what}." for name, what in report.versions.items()),
    ]
    if report.machine is not None:
        about.append(
            f"asynckv: {report.ours}. {report.began}, {report.seconds:.0f} s, load "
            f"{report.machine.load_before:.1f} before."
        )
    if report.reason:
        about.append(f"**Not measured further: {report.reason}**")
    lines = [*about, ""]
    if report.rows:
        lines += [_line(_HEAD), _line(["---"] * len(_HEAD))]
        lines += [*(_line(_cells(rows)) for rows in report.rows), ""]
    if report.lags:
        said = [
            f"{name} p99 {lag.p99:.1f}, most {lag.most:.1f} ({lag.count:,} ticks)"
            for name, lag in report.lags.items()
        ]
        idle = f" Idle CPU {report.idle_cpu or 0.0:.2f} cores."
        lines += [f"Loop lag, ms: {'; '.join(said)}.{idle}", ""]
    return "\n".join(lines)


def write_summary(reports: Sequence[PeerReport]) -> str:
    """Return a line for each peer: how many times faster asynckv is, without digests.

    In brackets what does not count, since the baseline differed from itself.
    """
    titles = {rows[OFF].subject.title: 0 for one in reports for rows in one.rows}
    ends = "loop lag p99, ms: asynckv, peer", "CPU s/GB: asynckv, peer"
    head = ["peer", *titles, *ends]
    lines = [_line(head), _line(["---"] * len(head))]
    for report in reports:
        by_title = {rows[OFF].subject.title: rows for rows in report.rows}
        lags = [report.lags[name] for name in (OFF, PEER) if name in report.lags]
        moved = next((one for one in report.rows if one[OFF].ours is not None), None)
        cells = [
            report.peer,
            *(_headline(by_title.get(title)) for title in titles),
            ", ".join(write_number(lag.p99) for lag in lags),
            ", ".join(_cpu(moved, name) for name in (OFF, PEER)) if moved else "",
        ]
        lines.append(_line(cells))
    lines += ["", *(f"{one.peer}: {one.reason}" for one in reports if one.reason)]
    return "\n".join(lines).rstrip()


def _headline(rows: Mapping[str, Row] | None) -> str:
    if rows is None:
        return "not measured"
    if rows[OFF].verdict == "failed":
        return "failed"
    ratio = write_number(_ratio(rows, OFF, PEER).median)
    return f"({ratio})" if rows[OFF].verdict == "void" else ratio


def _cells(rows: Mapping[str, Row]) -> list[str]:
    ours = rows[OFF]
    title, empty = ours.subject.title, [""] * (len(_HEAD) - 2)
    if ours.verdict == "failed":
        return [title, f"failed: {ours.reason}", *empty]
    pairs = ((OFF, PEER), (FULL, PEER), (OFF, RAW), (PEER, RAW))
    ratios = [write_spread(_ratio(rows, *pair)) for pair in pairs]
    a_a = f"{ours.baselines[0].a_a:.2f}{' **VOID**' * (ours.verdict == 'void')}"
    figures = [
        f"{write_number(_measured(rows, name).value.median)} {ours.subject.unit}"
        for name in (OFF, PEER, RAW, MEMCPY)
    ]
    cpu = ", ".join(_cpu(rows, name) for name in (OFF, FULL, PEER, RAW))
    is_ping = ours.subject.unit == "us"
    return [title, *ratios, a_a, *figures, "" if is_ping else cpu]


def _ratio(rows: Mapping[str, Row], one: str, other: str) -> Spread:
    [beside] = [each for each in rows[one].baselines if each.name == other]
    return speedup_of(rows[one].subject, beside)


def _measured(rows: Mapping[str, Row], name: str) -> Measured:
    row = rows[OFF]
    if name == OFF and row.ours is not None:
        return row.ours
    return next(one.measured for one in row.baselines if one.name == name)


def _cpu(rows: Mapping[str, Row], name: str) -> str:
    cpu = _measured(rows, name).cpu_s_per_gb
    return "-" if cpu is None else f"{cpu:.2f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
