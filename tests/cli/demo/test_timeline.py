from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET

import msgspec
import pytest

from asynckv.cli.demo.page import draw_backpressure, draw_bars, draw_timeline
from asynckv.cli.demo.report import DemoReport
from asynckv.cli.demo.wording import Bar


def rects(svg: str, kind: str) -> list[ET.Element]:
    return [
        rect for rect in ET.fromstring(svg).iter("rect") if rect.get("class") == kind
    ]


def test_each_layer_has_a_row(sample_report: DemoReport) -> None:
    svg = draw_timeline(sample_report.layerwise, 2.5)
    assert len(rects(svg, "compute")) == len(rects(svg, "wire")) == 30


def test_time_runs_to_the_right(sample_report: DemoReport) -> None:
    starts = [
        number(rect, "x")
        for rect in rects(draw_timeline(sample_report.layerwise, 2.5), "compute")
    ]
    assert starts == sorted(starts)


@pytest.mark.parametrize("layers", [1, 2, 200])
def test_any_number_of_layers_fits(sample_report: DemoReport, layers: int) -> None:
    rows = (sample_report.bulk.layers * 7)[:layers]
    bulk = msgspec.structs.replace(sample_report.bulk, layers=rows)
    root = ET.fromstring(draw_timeline(bulk, 2.6))
    assert number(root, "height") < 500


@pytest.mark.parametrize("first_token_s", [1.9, 2.4, 2.46])
def test_no_line_crosses_a_label(
    sample_report: DemoReport, first_token_s: float
) -> None:
    one = msgspec.structs.replace(sample_report.layerwise, first_token_s=first_token_s)
    root = ET.fromstring(draw_timeline(one, 2.5))
    lines = [line for line in root.iter("line") if "mark" in line.get("class", "")]
    labels = [text for text in root.iter("text") if "label" in text.get("class", "")]
    assert len(lines) == len(labels) == 2
    for label, line in itertools.product(labels, lines):
        is_left = number(line, "x1") < number(label, "x")
        assert not is_left or number(line, "y1") > number(label, "y")


def number(shape: ET.Element, name: str) -> float:
    return float(shape.get(name, "nan").rstrip("%"))


def test_what_lies_beyond_the_axis_stays_on_it(sample_report: DemoReport) -> None:
    for rect in rects(draw_timeline(sample_report.bulk, 1.0), "compute"):
        assert number(rect, "x") + number(rect, "width") <= 100.2


def test_the_longest_way_fills_the_width_and_its_stages_stand_end_to_end() -> None:
    slow, fast = Bar("slow", (1.0, 0.5, 0.5), "<&>"), Bar("fast", (0.0, 0.0, 0.5), "")
    drawn = ET.fromstring(draw_bars([slow, fast]))
    widths = [one.get("style", "").split()[1] for one in drawn.iter("i")]
    assert widths == ["50.0%", "25.0%", "25.0%", "25.0%"]
    assert [one.text for one in drawn.iter("b")] == ["2.00 s", "500 ms"]


def test_a_buffer_without_samples_can_be_drawn(sample_report: DemoReport) -> None:
    empty = msgspec.structs.replace(sample_report.backpressure, samples=())
    assert ET.fromstring(draw_backpressure(empty)).tag == "svg"
