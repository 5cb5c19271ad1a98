"""What was measured of one peer: from turns to rows, as JSON keeps them, as Markdown.

Ratios are taken iteration by iteration. Every one is of speeds: above 1 the first is
faster.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from asynckv.cli.bench.report import Machine, Spread, percentile, spread_of
from asynckv.cli.bench.rounds import A_A_BOUNDS, a_a_of
from asynckv.cli.bench.wording import write_number, write_spread
from benchmarks.peers.work import Work

__all__ = (
    "AGAIN",
    "PEER",
    "RAW",
    "Contended",
    "Lag",
    "PeerReport",
    "Row",
    "Turn",
    "in_turns",
    "lag_of",
    "row_of",
    "write_report",
    "write_summary",
)


class Contended(msgspec.Struct, frozen=True):
    """One contender of a row, over its iterations."""

    elapsed_us: Spread
    gb_per_s: Spread
    cpu_s_per_gb: float
    """Of both processes together."""


class Row(msgspec.Struct, frozen=True):
    """One work. ``void``: the baseline did not agree with itself.

    ``ratios`` are of speeds, by their names ``A / B``: above 1, A is faster.
    """

    work: str
    title: str
    verdict: Literal["ok", "void", "failed"]
    reason: str = ""
    iterations: int = 0
    contenders: Mapping[str, Contended] = {}
    ratios: Mapping[str, Spread] = {}
    a_a: float = 0.0


class Lag(msgspec.Struct, frozen=True):
    """How late a ticker of 1 ms was on the event loop, in milliseconds."""

    ticks: int
    p99_ms: float
    most_ms: float


class PeerReport(msgspec.Struct, frozen=True):
    """Everything one run measured of one peer, or why it measured nothing more.

    ``lags`` while layers move back to back; of whom blocks, its thread does.
    ``idle_cpu`` is the share of a core that the peer's processes take while
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
    rows: tuple[Row, ...] = ()
    lags: Mapping[str, Lag] = {}
    idle_cpu: float | None = None


RAW: Final = "raw TCP"
AGAIN: Final = "raw TCP again"
PEER: Final = "peer"


@dataclasses.dataclass(frozen=True)
class Turn:
    """What one pull took, and how much CPU both processes together."""

    elapsed_s: float
    cpu_s: float = 0.0


def in_turns(names: Sequence[str], iteration: int) -> list[str]:
    """Return who comes when: the baseline first and last, the others to and fro.

    >>> in_turns(["a", "b"], 0), in_turns(["a", "b"], 1)
    (['raw TCP', 'a', 'b', 'raw TCP again'], ['raw TCP', 'b', 'a', 'raw TCP again'])
    """
    middle = list(names) if iteration % 2 == 0 else list(reversed(names))
    return [RAW, *middle, AGAIN]


def row_of(work: Work, iterations: Sequence[Mapping[str, Turn]]) -> Row:
    """Return what the iterations of one work add up to.

    Each maps the names of :func:`in_turns` to their turns.

    :raises ValueError: there are no iterations
    """
    if not iterations:
        raise ValueError("no iterations, no row")
    merged = [_with_mean_raw(one) for one in iterations]
    names = list(merged[0])
    beside = [name for name in names if name not in (RAW, PEER, "memcpy")]
    ratios = {f"{name} / {PEER}": _ratio(merged, name, PEER) for name in beside}
    ratios |= {f"{name} / {RAW}": _ratio(merged, name, RAW) for name in (*beside, PEER)}
    # Which turn is divided by which changes each time.
    a_a = a_a_of([one[AGAIN].elapsed_s / one[RAW].elapsed_s for one in iterations])
    low, high = A_A_BOUNDS
    is_void = not low <= a_a <= high
    return Row(
        work.name,
        work.title,
        verdict="void" if is_void else "ok",
        reason=f"A/A {a_a:.3f} outside {low}-{high}" if is_void else "",
        iterations=len(iterations),
        contenders={name: _contended(work, merged, name) for name in names},
        ratios=ratios,
        a_a=a_a,
    )


def lag_of(lags_ms: Sequence[float]) -> Lag:
    """Return how late a ticker was.

    :raises ValueError: it never ticked
    """
    return Lag(len(lags_ms), percentile(lags_ms, 0.99), max(lags_ms))


def _with_mean_raw(iteration: Mapping[str, Turn]) -> dict[str, Turn]:
    """Between its two turns a steady drift cancels out."""
    first, second = iteration[RAW], iteration[AGAIN]
    mean = Turn(
        (first.elapsed_s + second.elapsed_s) / 2, (first.cpu_s + second.cpu_s) / 2
    )
    others = {name: turn for name, turn in iteration.items() if name != AGAIN}
    return {**others, RAW: mean}


def _ratio(iterations: Sequence[Mapping[str, Turn]], ours: str, other: str) -> Spread:
    return spread_of([one[other].elapsed_s / one[ours].elapsed_s for one in iterations])


def _contended(
    work: Work, iterations: Sequence[Mapping[str, Turn]], name: str
) -> Contended:
    turns = [one[name] for one in iterations]
    cpu_s = sum(turn.cpu_s for turn in turns)
    return Contended(
        elapsed_us=spread_of([turn.elapsed_s * 1e6 for turn in turns]),
        gb_per_s=spread_of([work.total / turn.elapsed_s / 1e9 for turn in turns]),
        cpu_s_per_gb=cpu_s / (work.total * len(turns)) * 1e9,
    )


_OFF, _FULL = "asynckv off", "asynckv full"
_HEAD = (
    "work",
    "off / peer",
    "full / peer",
    "off / raw",
    "peer / raw",
    "A/A",
    "off",
    "peer",
    "raw",
    "memcpy",
    "CPU s/GB off, full, peer, raw",
)


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
        lines += [_line(_cells(row)) for row in report.rows]
        lines.append("")
    lines += _lags(report)
    return "\n".join(lines)


def write_summary(reports: Sequence[PeerReport]) -> str:
    """Return a line for each peer: how many times faster asynckv is, without digests.

    In brackets what does not count, since the baseline differed from itself.
    """
    works = list(dict.fromkeys(row.title for one in reports for row in one.rows))
    head = [
        "peer",
        *works,
        "loop lag p99, ms: asynckv, peer",
        "CPU s/GB: asynckv, peer",
    ]
    lines = [_line(head), _line(["---"] * len(head))]
    for report in reports:
        rows = {row.title: row for row in report.rows}
        ratios = [_headline(rows.get(title)) for title in works]
        lines.append(
            _line([report.peer, *ratios, _both_lags(report), _both_cpu(report)])
        )
    lines += ["", *(f"{one.peer}: {one.reason}" for one in reports if one.reason)]
    return "\n".join(lines).rstrip()


def _headline(row: Row | None) -> str:
    if row is None:
        return "not measured"
    if row.verdict == "failed":
        return "failed"
    spread = row.ratios.get(f"{_OFF} / {PEER}") or row.ratios[f"{_FULL} / {PEER}"]
    text = write_number(spread.median)
    return f"({text})" if row.verdict == "void" else text


def _both_lags(report: PeerReport) -> str:
    both = [report.lags.get(name) for name in (_OFF, PEER)]
    return ", ".join(write_number(lag.p99_ms) for lag in both if lag)


def _both_cpu(report: PeerReport) -> str:
    layers = next((row for row in report.rows if row.contenders), None)
    return ", ".join(_cpu(layers, name) for name in (_OFF, PEER)) if layers else ""


def _cells(row: Row) -> list[str]:
    if row.verdict == "failed":
        return [row.title, f"failed: {row.reason}", *[""] * (len(_HEAD) - 2)]
    names = (
        f"{_OFF} / {PEER}",
        f"{_FULL} / {PEER}",
        f"{_OFF} / {RAW}",
        f"{PEER} / {RAW}",
    )
    ratios = [
        write_spread(row.ratios[one]) if one in row.ratios else "" for one in names
    ]
    a_a = f"{row.a_a:.2f}{' **VOID**' if row.verdict == 'void' else ''}"
    figures = [_figure(row, name) for name in (_OFF, PEER, RAW, "memcpy")]
    cpu = ", ".join(_cpu(row, name) for name in (_OFF, _FULL, PEER, RAW))
    return [row.title, *ratios, a_a, *figures, "" if row.work == "ping" else cpu]


def _figure(row: Row, name: str) -> str:
    one = row.contenders.get(name)
    if one is None:
        return ""
    if row.work == "ping":
        return f"{write_number(one.elapsed_us.median)} us"
    return f"{write_number(one.gb_per_s.median)} GB/s"


def _cpu(row: Row, name: str) -> str:
    one: Contended | None = row.contenders.get(name)
    return f"{one.cpu_s_per_gb:.2f}" if one else "-"


def _lags(report: PeerReport) -> list[str]:
    if not report.lags:
        return []
    said = [
        f"{name} p99 {lag.p99_ms:.1f}, most {lag.most_ms:.1f} ({lag.ticks:,} ticks)"
        for name, lag in report.lags.items()
    ]
    idle = "" if report.idle_cpu is None else f" Idle CPU {report.idle_cpu:.2f} cores."
    return [f"Loop lag, ms: {'; '.join(said)}.{idle}", ""]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
