"""Reports as Markdown, for the terminal and for results."""

from __future__ import annotations

from collections.abc import Sequence

from asynckv.cli.bench.wording import write_number, write_spread
from benchmarks.peers.pairing import PEER, RAW
from benchmarks.peers.report import Contended, PeerReport, Row

__all__ = ("write_report", "write_summary")

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
