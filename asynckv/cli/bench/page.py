"""The bench's page: one self-contained HTML file, in light and in dark.

A pure function of the report; nothing on the page is fetched from anywhere.
"""

from __future__ import annotations

from html import escape

from asynckv.cli.bench.curves import lag_bars, latency_lines, throughput_lines
from asynckv.cli.bench.plots import draw_histograms, draw_lines
from asynckv.cli.bench.report import Baseline, BenchReport, Row
from asynckv.cli.bench.wording import (
    speedup_of,
    write_comparison,
    write_cpu,
    write_machine,
    write_nbytes,
    write_run,
    write_summary,
    write_value,
    write_verdict,
)
from asynckv.cli.document import write_document

__all__ = ("render_page",)

_NOT_DRAWN = '<p class="note">Nothing was measured that could be drawn here.</p>'


def render_page(report: BenchReport) -> str:
    """Return the whole page as text."""
    parts = (_head, _throughput, _latency, _lag, _table, _foot)
    body = "\n".join(part(report) for part in parts)
    return write_document("asynckv bench", __package__, body)


def _head(report: BenchReport) -> str:
    facts = f"{write_run(report)} · {write_machine(report)}"
    return (
        f'<h1>asynckv bench</h1>\n<p class="facts">{escape(facts)}</p>\n'
        f'<p class="summary" id="summary">{escape(write_summary(report))}</p>\n'
        '<p class="note">Every figure was measured in rounds, each between two turns '
        "of its baseline. Read the comparisons: absolute figures drift. Void rows, and "
        "hollow points, do not count: the baseline did not agree with itself, or the "
        "rounds not with each other.</p>"
    )


def _key(*entries: tuple[str, str]) -> str:
    items = "".join(
        f'<li style="--swatch: var(--{kind})">{escape(name)}</li>'
        for name, kind in entries
    )
    return f'<ul class="key">{items}</ul>'


def _throughput(report: BenchReport) -> str:
    title = "Throughput against size"
    lines = throughput_lines(report)
    key = _key(*((line.name, line.kind) for line in lines))
    drawn = draw_lines(
        title, lines, "GB/s", lambda x: write_nbytes(int(x)), "bytes of an entry"
    )
    note = (
        '<p class="note">Higher is better. An entry is found, lent, moved and '
        "acknowledged: for a small one that takes longer than its bytes do.</p>"
    )
    return f"<h2>{title}</h2>\n{note}{key}\n{drawn or _NOT_DRAWN}"


def _latency(report: BenchReport) -> str:
    key = _key(("asynckv", "ours"), ("bare asyncio streams", "raw"))
    title = "Latency against outstanding requests"
    drawn = draw_lines(
        title,
        latency_lines(report),
        "ms",
        lambda x: f"{x:,.0f}",
        "requests outstanding",
    )
    note = (
        '<p class="note">Lower is better. Half of the requests took less than the line '
        "(p50), 99% less than the dashed line (p99).</p>"
    )
    return f"<h2>{title}</h2>\n{note}{key}\n{drawn or _NOT_DRAWN}"


def _lag(report: BenchReport) -> str:
    found = lag_bars(report)
    key = _key(*((bars.name, bars.kind) for bars in found))
    drawn = draw_histograms("Loop lag", found, "ms")
    note = (
        '<p class="note">How late the event loop ran what was due every 1 ms. Further '
        "left is better.</p>"
    )
    return f"<h2>Loop lag</h2>\n{note}{key}\n{drawn or _NOT_DRAWN}"


def _table(report: BenchReport) -> str:
    rows = "\n".join(_table_row(row) for row in report.rows)
    head = "".join(
        f"<th>{name}</th>"
        for name in ("case", "asynckv", "beside, in the same rounds", "")
    )
    return (
        '<h2>All rows</h2>\n<p class="note">Medians of the rounds [least-most].</p>\n'
        f'<table id="rows"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody></table>"
    )


def _table_row(row: Row) -> str:
    beside = [
        f'<span class="{_direction(row, one)}">'
        f"{escape(write_comparison(row.subject, one))}</span>"
        for one in row.baselines
    ]
    if cpu := write_cpu(row):
        beside.append(f'<span class="cpu">{escape(cpu)}</span>')
    return (
        f'<tr class="{row.verdict}"><th scope="row">{escape(row.subject.title)}</th>'
        f'<td class="value">{escape(write_value(row))}</td>'
        f"<td>{'<br>'.join(beside)}</td>"
        f'<td class="{row.verdict}">{escape(write_verdict(row))}</td></tr>'
    )


def _direction(row: Row, baseline: Baseline) -> str:
    return "better" if speedup_of(row.subject, baseline).median >= 1 else "worse"


def _foot(report: BenchReport) -> str:
    rounds = max((row.rounds for row in report.rows), default=0)
    return (
        f"<footer>Written by <code>asynckv bench</code> after {report.seconds:.0f} s, "
        f"{rounds} rounds a case.</footer>"
    )
