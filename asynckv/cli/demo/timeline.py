"""The page's pictures: inline SVG that takes its colours from the page's style."""

from __future__ import annotations

import math
from html import escape

from asynckv.cli.demo.report import BackpressureReport, HandOver, LayerTrace
from asynckv.cli.demo.wording import write_bytes, write_seconds

__all__ = ("draw_backpressure", "draw_bars", "draw_timeline")

_WIDTH = 960
_LEFT = 64
_RIGHT = 24
_TOP = 30
_MAX_LANES_HEIGHT = 420


class _Scale:
    """Seconds to pixels, and where the ticks go."""

    def __init__(self, span_s: float) -> None:
        self.span_s = max(span_s, 1e-3)
        self._factor = (_WIDTH - _LEFT - _RIGHT) / self.span_s

    def x(self, at_s: float) -> float:
        return round(_LEFT + min(max(at_s, 0.0), self.span_s) * self._factor, 2)

    def width(self, start_s: float, end_s: float) -> float:
        return max(1.0, round(self.x(end_s) - self.x(start_s), 2))

    def ticks(self) -> list[float]:
        step = _nice_step(self.span_s / 8)
        return [step * index for index in range(int(self.span_s / step) + 1)]


def _nice_step(at_least: float) -> float:
    magnitude = 10.0 ** math.floor(math.log10(at_least))
    factors = (1.0, 2.0, 5.0, 10.0)
    return next(f * magnitude for f in factors if f * magnitude >= at_least * 0.999)


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>'


def _rect(kind: str, x: float, y: float, width: float, height: float) -> str:
    place = f'x="{x}" y="{round(y, 2)}" width="{width}" height="{height}"'
    return f'<rect class="{kind}" {place}/>'


def _text(kind: str, x: float, y: float, text: str, anchor: str = "end") -> str:
    place = f'x="{x}" y="{round(y, 2)}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{text}</text>'


def _svg(height: float, title: str, parts: list[str]) -> str:
    box = f'viewBox="0 0 {_WIDTH} {round(height)}"'
    label = f'role="img" aria-label="{escape(title)}"'
    return f"<svg {box} {label}>{''.join(parts)}</svg>"


def _axis(scale: _Scale, bottom: float) -> list[str]:
    parts = []
    for tick in scale.ticks():
        x = scale.x(tick)
        label = f"{tick:g} s" if tick else "0"
        parts.append(_line("grid", x, _TOP, x, bottom))
        parts.append(_text("tick", x, bottom + 16, label, "middle"))
    return parts


def draw_timeline(hand_over: HandOver, span_s: float) -> str:
    """Draw one lane a layer: compute above, its way below, a tick where it landed.

    ``span_s`` is the length of the axis, so that two timelines can share it.
    """
    scale = _Scale(span_s)
    count = max(1, len(hand_over.layers))
    lane = min(14.0, _MAX_LANES_HEIGHT / count)
    bottom = round(_TOP + lane * count + 4, 2)
    every = next(step for step in (1, 2, 5, 10, 20, 50, 1000) if lane * step >= 13)
    parts = _axis(scale, bottom)
    for index, layer in enumerate(hand_over.layers):
        label = str(index) if index % every == 0 else ""
        parts.append(_lane(layer, scale, _TOP + index * lane + 2, lane, label))
    parts += _marks(hand_over, scale, bottom)
    return _svg(bottom + 26, f"{hand_over.title} hand-over, one lane a layer", parts)


def _lane(layer: LayerTrace, scale: _Scale, y: float, lane: float, label: str) -> str:
    half = round((lane - 2) / 2, 2)
    start_s, end_s = layer.compute_start_s, layer.compute_end_s
    handed_s, landed_s = layer.handed_s, layer.landed_s
    hint = (
        f"{layer.name}: computed in {write_seconds(end_s - start_s)}, landed "
        f"{write_seconds(max(0.0, landed_s - handed_s))} after it was handed over"
    )
    compute = scale.x(start_s), y, scale.width(start_s, end_s), half
    wire = scale.x(handed_s), y + half, scale.width(handed_s, landed_s), half
    parts = (
        f"<title>{escape(hint)}</title>",
        _text("tick", _LEFT - 10, y + lane / 2 + 3, label),
        _rect("compute", *compute),
        _rect("wire", *wire),
        f'<path class="landed" d="M{scale.x(landed_s)},{round(y, 2)} v{2 * half}"/>',
    )
    return f'<g class="lane">{"".join(parts)}</g>'


def _marks(hand_over: HandOver, scale: _Scale, bottom: float) -> list[str]:
    end, first = scale.x(hand_over.prefill_s), scale.x(hand_over.first_token_s)
    early = hand_over.wait_s <= 0.0
    when = "before that" if early else f"+{write_seconds(hand_over.wait_s)}"
    marks = [
        (end, "mark", "label", "prefill computed"),
        (first, "mark first", "label strong", f"first token here, {when}"),
    ]
    marks.sort(key=lambda mark: mark[0])
    parts = []
    # Labels stand left of their lines, which are at the right edge: the line that is
    # further right has the upper label, so that the other does not cross it.
    for (x, line, label, text), up in zip(marks, (0, 14), strict=True):
        parts.append(_line(line, x, _TOP - 4 - up, x, bottom))
        parts.append(_text(label, x - 6, _TOP - 1 - up, text))
    return parts


def draw_bars(bars: list[tuple[str, float, str]]) -> str:
    """Draw durations as bars to compare: name, seconds, remark."""
    longest = max(seconds for _, seconds, _ in bars)
    left, room = 150, _WIDTH - 150 - 190
    parts = []
    for index, (name, seconds, remark) in enumerate(bars):
        y = 6 + index * 34
        width = max(2.0, round(room * seconds / max(longest, 1e-6), 2))
        note = f'<tspan class="remark" dx="8">{escape(remark)}</tspan>'
        value = write_seconds(seconds) + note
        parts.append(_text("name", left - 14, y + 18, escape(name)))
        parts.append(_rect("bar slow" if index == 0 else "bar", left, y, width, 26))
        parts.append(_text("value", left + width + 10, y + 18, value, "start"))
    return _svg(len(bars) * 34 + 10, "Time to first token", parts)


def draw_backpressure(report: BackpressureReport) -> str:
    """Draw how full the buffer was, under the line of what it may hold."""
    samples = report.samples
    began_s = samples[0].at_s if samples else 0.0
    scale = _Scale(samples[-1].at_s - began_s if samples else 1.0)
    ceiling = max(report.max_bytes, report.peak_bytes, 1) * 1.12

    def y(nbytes: float) -> float:
        return round(_TOP + 120 * (1 - nbytes / ceiling), 2)

    bottom, bound, right = y(0), y(report.max_bytes), _WIDTH - _RIGHT
    steps = [
        f"H{scale.x(sample.at_s - began_s)}V{y(sample.buffered_bytes)}"
        for sample in samples
    ]
    path = f"M{_LEFT},{bottom}{''.join(steps)}V{bottom}Z"
    limit = f"max_bytes = {write_bytes(report.max_bytes)}"
    parts = [
        *_axis(scale, bottom),
        f'<path class="area" d="{path}"/>',
        _line("bound", _LEFT, bound, right, bound),
        _text("label", right, bound - 6, limit),
        _text("tick", _LEFT - 10, bottom, "0"),
    ]
    return _svg(bottom + 26, "Bytes in the buffer over time", parts)
