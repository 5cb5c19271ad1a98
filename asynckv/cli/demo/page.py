"""The demo's page: one self-contained HTML file, in light and in dark.

A pure function of the report; nothing on the page is fetched from anywhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from html import escape

from asynckv.cli.demo.report import (
    BackpressureReport,
    Bar,
    DemoReport,
    HandOver,
    LayerTrace,
    figures_of,
    first_token_bars,
    second_request_bars,
    write_bytes,
    write_fall,
    write_machine,
    write_seconds,
    write_tail,
    write_transport,
)
from asynckv.cli.document import (
    draw_line,
    draw_rect,
    draw_text,
    picture_of,
    write_document,
    write_head,
    write_numbers,
    write_section,
    write_verdict,
)

__all__ = (
    "STAGES",
    "draw_backpressure",
    "draw_bars",
    "draw_timeline",
    "render_page",
)


STAGES = ("compute", "wire", "step")
"""Classes of the page's style, for the stages of a bar."""

_TOP = 36
_MAX_ROWS_HEIGHT = 420
_LEAST_WIDTH = 0.15


class _Scale:
    """Seconds to percent of the width, and where the ticks go."""

    def __init__(self, span_s: float) -> None:
        self.span_s = max(span_s, 1e-3)

    def x(self, at_s: float) -> float:
        return round(100 * min(max(at_s, 0.0), self.span_s) / self.span_s, 3)

    def width(self, start_s: float, end_s: float) -> float:
        return max(_LEAST_WIDTH, round(self.x(end_s) - self.x(start_s), 3))

    def ticks(self) -> list[float]:
        step = _nice_step(self.span_s / 6)
        return [step * index for index in range(int(self.span_s / step) + 1)]


def _nice_step(at_least: float) -> float:
    magnitude = 10.0 ** math.floor(math.log10(at_least))
    factors = (1.0, 2.0, 5.0, 10.0)
    return next(f * magnitude for f in factors if f * magnitude >= at_least * 0.999)


def _axis(scale: _Scale, bottom: float) -> list[str]:
    parts = []
    for tick in scale.ticks():
        x = scale.x(tick)
        label = f"{tick:g} s" if tick else "0"
        parts.append(draw_line("grid", (x, _TOP), (x, bottom)))
        parts.append(draw_text("tick", x, bottom + 16, label, "middle"))
    return parts


def draw_timeline(hand_over: HandOver, span_s: float) -> str:
    """Draw a row for each layer: compute above, its way below, a tick where it came.

    ``span_s`` is the length of the axis, so that two timelines can share it.
    """
    scale = _Scale(span_s)
    count = max(1, len(hand_over.layers))
    height = min(14.0, _MAX_ROWS_HEIGHT / count)
    bottom = round(_TOP + height * count + 4, 2)
    every = next(step for step in (1, 2, 5, 10, 20, 50, 1000) if height * step >= 13)
    parts = _axis(scale, bottom)
    for index, layer in enumerate(hand_over.layers):
        label = str(index) if index % every == 0 else ""
        parts.append(_row(layer, scale, _TOP + index * height + 2, height, label))
    parts += _marks(hand_over, scale, bottom)
    return picture_of(
        bottom + 26, f"{hand_over.title} hand-over, one row a layer", parts
    )


def _row(layer: LayerTrace, scale: _Scale, y: float, height: float, label: str) -> str:
    half = round((height - 2) / 2, 2)
    start_s, end_s = layer.compute_start_s, layer.compute_end_s
    handed_s, landed_s = layer.handed_s, layer.landed_s
    hint = (
        f"{layer.name}: computed in {write_seconds(end_s - start_s)}, in the decoder "
        f"{write_seconds(landed_s - handed_s)} after it was handed over"
    )
    at = scale.x(landed_s)
    parts = (
        f"<title>{escape(hint)}</title>",
        draw_text("tick", 0, y + height / 2 + 3, label, dx=-10),
        draw_rect("compute", scale.x(start_s), y, scale.width(start_s, end_s), half),
        draw_rect(
            "wire", scale.x(handed_s), y + half, scale.width(handed_s, landed_s), half
        ),
        draw_line("landed", (at, y), (at, y + 2 * half)),
    )
    return f'<g class="row">{"".join(parts)}</g>'


def _marks(hand_over: HandOver, scale: _Scale, bottom: float) -> list[str]:
    end, first = scale.x(hand_over.prefill_s), scale.x(hand_over.first_token_s)
    first_words = f"first token {write_seconds(hand_over.first_token_s)}"
    end_words = f"prefill computed {write_seconds(hand_over.prefill_s)}"
    marks = [
        (end, "mark", "label", end_words),
        (first, "mark first", "label strong", first_words),
    ]
    marks.sort(key=lambda mark: mark[0])
    parts = []
    # Labels stand left of their lines, which are at the right edge: the line that is
    # further right has the upper label, so that the other does not cross it.
    for (x, line, label, text), up in zip(marks, (0, 16), strict=True):
        parts.append(draw_line(line, (x, _TOP - 4 - up), (x, bottom)))
        parts.append(draw_text(label, x, _TOP - 4 - up, text, dx=-6))
    return parts


def draw_bars(bars: Sequence[Bar]) -> str:
    """Draw ways to a first token, to be compared: stages end to end, then the sum."""
    longest_s = max(max(sum(bar.stages_s) for bar in bars), 1e-6)
    return f'<div class="bars">{"".join(_bar(bar, longest_s) for bar in bars)}</div>'


def _bar(bar: Bar, longest_s: float) -> str:
    stages = "".join(
        f'<i class="{kind}" style="width: {round(100 * seconds / longest_s, 3)}%" '
        f'title="{write_seconds(seconds)}"></i>'
        for kind, seconds in zip(STAGES, bar.stages_s, strict=True)
        if seconds > 0.0
    )
    return (
        f'<div class="way"><div class="name">{escape(bar.name)}</div>'
        f'<div class="track">{stages}</div>'
        f'<div class="sum"><b>{write_seconds(sum(bar.stages_s))}</b> '
        f"<small>{escape(bar.remark)}</small></div></div>"
    )


def draw_backpressure(report: BackpressureReport) -> str:
    """Draw how full the buffer was, under the line of what it may hold."""
    samples = report.samples
    began_s = samples[0].at_s if samples else 0.0
    scale = _Scale(samples[-1].at_s - began_s if samples else 1.0)
    ceiling = max(report.max_bytes, report.peak_bytes, 1) * 1.12

    def y(nbytes: float) -> float:
        return round(_TOP + 120 * (1 - nbytes / ceiling), 2)

    bottom, bound = y(0), y(report.max_bytes)
    area = [
        draw_rect(
            "area",
            scale.x(one.at_s - began_s),
            y(one.buffered_bytes),
            scale.width(one.at_s - began_s, after.at_s - began_s),
            bottom - y(one.buffered_bytes),
        )
        for one, after in itertools.pairwise(samples)
    ]
    limit = f"max_bytes = {write_bytes(report.max_bytes)}"
    parts = [
        *_axis(scale, bottom),
        *area,
        draw_line("bound", (0, bound), (100, bound)),
        draw_text("label", 100, bound - 6, limit),
        draw_text("tick", 0, bottom, "0", dx=-10),
    ]
    return picture_of(bottom + 26, "Bytes in the buffer over time", parts)


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
            write_numbers(figures_of(report)),
            _words_of(report),
            _foot(report),
        )
    )
    return write_document("asynckv: prefill here, decode there", __package__, body)


def _head(report: DemoReport) -> str:
    facts = (
        f"{report.model} on {report.device} · {report.prompt_tokens:,} prompt tokens · "
        f"{write_bytes(report.kv_bytes)} of KV, {write_transport(report.transport)}"
    )
    same = "every act generated the same tokens"
    verdict = write_verdict(report.tokens_identical, same, report.problems)
    title = "Prefill here, decode there"
    return f"{write_head(title, facts, write_machine(report.machine))}\n{verdict}"


def _first_token(report: DemoReport) -> str:
    positions = report.recompute.prompt_positions
    note = (
        f"All bars count from the request. Given KV, the decoder computes 1 position "
        f"instead of {positions:,}: the prompt is computed in the other process, and "
        "takes as long there. So one request alone does not come sooner; the decoder "
        "is free for others meanwhile. Layer by layer, the KV moves during the compute."
    )
    bars = draw_bars(first_token_bars(report))
    return write_section("Time to first token", note, _STAGES_KEY, bars)


def _second(report: DemoReport) -> str:
    second = report.second
    note = (
        "Another question about a document whose KV the prefill process has kept. The "
        f"decoder takes it and computes only the other {second.prompt_positions:,} "
        "positions. It was recomputed before and after; the faster counts."
    )
    return write_section(
        "A second request on the same document",
        note,
        draw_bars(second_request_bars(second)),
        f'<p id="fall">{write_fall(second)}.</p>',
    )


def _timelines(report: DemoReport) -> str:
    handed = (report.layerwise, report.bulk)
    span_s = max(max(one.first_token_s, one.prefill_s) for one in handed) * 1.01
    note = (
        "One row a layer, seconds since the request; both pictures share their axis. "
        "Keys and values of a layer exist before its attention and MLP are computed: "
        "so it can be in the decoder before its own compute ends."
    )
    timelines = (
        f"<h3>{escape(f'{one.title}: {write_tail(one)}')}</h3>\n"
        f"{draw_timeline(one, span_s)}"
        for one in handed
    )
    return write_section("Where the time goes", note, _ROWS_KEY, *timelines)


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


def _words_of(report: DemoReport) -> str:
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
