"""The demo's page: one self-contained HTML file, in light and in dark.

A pure function of the report; nothing on the page is fetched from anywhere.
"""

from __future__ import annotations

from html import escape

from asynckv.cli.demo.report import DemoReport
from asynckv.cli.demo.timeline import draw_backpressure, draw_bars, draw_timeline
from asynckv.cli.demo.wording import (
    figures_of,
    first_token_bars,
    second_request_bars,
    write_bytes,
    write_fall,
    write_seconds,
    write_tail,
    write_transport,
)
from asynckv.cli.document import write_document

__all__ = ("render_page",)

_STAGES_KEY = """<ul class="key">
<li style="--swatch: var(--compute)">prompt computed</li>
<li style="--swatch: var(--wire)">KV still on its way (the tail)</li>
<li style="--swatch: var(--step)">the decoder's first step</li>
</ul>"""
_ROWS_KEY = """<ul class="key">
<li style="--swatch: var(--compute)">computed by the prefill process</li>
<li style="--swatch: var(--wire)">on its way</li>
<li class="tick-swatch" style="--swatch: var(--landed)">in the decoder</li>
<li class="tick-swatch" style="--swatch: var(--first)">first token</li>
</ul>"""


def render_page(report: DemoReport) -> str:
    """Return the whole page as text."""
    body = "\n".join(
        (
            _head(report),
            _first_token(report),
            _second(report),
            _timelines(report),
            _backpressure(report),
            _survival(report),
            _table(report),
            _text(report),
            _foot(report),
        )
    )
    return write_document("asynckv: prefill here, decode there", __package__, body)


def _head(report: DemoReport) -> str:
    identical = report.tokens_identical
    good = identical and not report.problems
    words = "every act generated the same tokens" if identical else "tokens differ"
    if identical and report.problems:
        words += ", but something else went wrong"
    machine = report.machine
    facts = (
        f"{report.model} on {report.device} · {report.prompt_tokens:,} prompt tokens · "
        f"{write_bytes(report.kv_bytes)} of KV, {write_transport(report.transport)}"
    )
    where = (
        f"asynckv {machine.version} · {machine.began} · {machine.host} · "
        f"Python {machine.python}, torch {machine.torch}"
    )
    problems = "".join(f"<li>{escape(problem)}</li>" for problem in report.problems)
    listed = f'<ul class="problems">{problems}</ul>' if problems else ""
    return (
        "<h1>Prefill here, decode there</h1>\n"
        f'<p class="facts">{escape(facts)}</p>\n'
        f'<p class="facts">{escape(where)}</p>\n'
        f'<p class="verdict{"" if good else " bad"}" id="verdict">{words}</p>{listed}'
    )


def _first_token(report: DemoReport) -> str:
    positions = report.recompute.prompt_positions
    note = (
        f"All bars count from the request. Given KV, the decoder computes 1 position "
        f"instead of {positions:,}: the prompt is computed in the other process, and "
        "takes as long there. So one request alone does not come sooner; the decoder "
        "is free for others meanwhile. Layer by layer, the KV moves during the compute."
    )
    bars = draw_bars(first_token_bars(report))
    return (
        "<h2>Time to first token</h2>\n"
        f'<p class="note">{note}</p>\n{_STAGES_KEY}\n{bars}'
    )


def _second(report: DemoReport) -> str:
    second = report.second
    note = (
        "Another question about a document whose KV the prefill process has kept. The "
        f"decoder takes it and computes only the other {second.prompt_positions:,} "
        "positions. It was recomputed before and after; the faster counts."
    )
    return (
        "<h2>A second request on the same document</h2>\n"
        f'<p class="note">{note}</p>\n{draw_bars(second_request_bars(second))}\n'
        f'<p id="fall">{write_fall(second)}.</p>'
    )


def _timelines(report: DemoReport) -> str:
    handed = (report.layerwise, report.bulk)
    span_s = max(max(one.first_token_s, one.prefill_s) for one in handed) * 1.01
    note = (
        "One row a layer, seconds since the request; both pictures share their axis. "
        "Keys and values of a layer exist before its attention and MLP are computed: "
        "so it can be in the decoder before its own compute ends."
    )
    parts = [f'<h2>Where the time goes</h2>\n<p class="note">{note}</p>\n{_ROWS_KEY}']
    for one in handed:
        title = f"{one.title}: {write_tail(one)}"
        parts.append(f"<h3>{escape(title)}</h3>\n{draw_timeline(one, span_s)}")
    return "\n".join(parts)


def _backpressure(report: DemoReport) -> str:
    act = report.backpressure
    words = (
        f"{act.entries} entries of {write_bytes(act.entry_bytes)} for a buffer of "
        f"{write_bytes(act.max_bytes)}. <code>insert</code> waited up to "
        f"{write_seconds(act.longest_wait_s)} for room; meanwhile the producer's "
        f"memory grew by {write_bytes(act.resident_growth_bytes)} and its event loop "
        f"was never more than {write_seconds(act.worst_lag_s)} late."
    )
    return f"<h2>A slow decoder</h2>\n<p>{words}</p>\n{draw_backpressure(act)}"


def _survival(report: DemoReport) -> str:
    act = report.survival
    running = ", while the prefill was still computing" if act.prefill_running else ""
    taken = act.taken_over
    words = (
        f"Decode process {act.killed_pid} was killed (SIGKILL) when "
        f"{act.landed_before} of {len(taken.layers)} layers had come{running}. The "
        f"entry could be taken again after {write_seconds(act.back_after_s)}. Decode "
        f"process {act.successor_pid}, which stood by, took it as delivery "
        f"{taken.attempt}, computed {taken.prompt_positions} prompt position and went "
        "on."
    )
    return f"<h2>A killed decoder</h2>\n<p>{words}</p>"


def _table(report: DemoReport) -> str:
    rows = "\n".join(
        f'<tr><th scope="row">{escape(figure.name)}</th>'
        f'<td class="value">{escape(figure.value)}</td>'
        f'<td class="remark">{escape(figure.remark)}</td></tr>'
        for figure in figures_of(report)
    )
    table = f'<table id="numbers">\n<tbody>\n{rows}\n</tbody>\n</table>'
    return f"<h2>The numbers</h2>\n{table}"


def _text(report: DemoReport) -> str:
    return (
        "<h2>What the decoder wrote</h2>\n"
        f'<blockquote id="text">{escape(report.text)}</blockquote>'
    )


def _foot(report: DemoReport) -> str:
    took, device = write_seconds(report.seconds), report.device
    shared = "its cores" if device == "cpu" else f"its {escape(device)}"
    return (
        f"<footer>Written by <code>asynckv demo</code> in {took}, loading included. "
        f"The processes ran on one machine and share {shared}. Each figure was "
        "measured once: what else ran then is in it.</footer>"
    )
