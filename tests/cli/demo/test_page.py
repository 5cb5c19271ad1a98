"""The page, and how a real browser shows it."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from asynckv.cli.demo.page import (
    draw_backpressure,
    draw_bars,
    draw_timeline,
    render_page,
)
from asynckv.cli.demo.report import (
    Bar,
    DemoReport,
    figures_of,
    first_token_bars,
    write_bytes,
    write_fall,
    write_seconds,
    write_tail,
    write_transport,
)

LookAt = Callable[..., dict[str, Any]]

# What to look for in this page alone: expressions of the browser's.
SEEN = {
    "rows": 'all(".row").length',
    "thinnest": 'Math.min(...all("rect, .track i").map(one => box(one).width))',
    "smallest": 'Math.min(...all("svg text").map(one => box(one).height))',
    "compute": 'brightness("rect.compute", "fill")',
    "text": 'text("#text")',
    "verdict": 'text("#verdict")',
}


def test_the_page_refers_to_nothing_outside_itself(sample_report: DemoReport) -> None:
    page = render_page(sample_report)
    assert not re.search(r"https?:|\ssrc=|@import|url\(|<link|<script", page)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("text", "<b>&</b>", "&lt;b&gt;&amp;&lt;/b&gt;"),
        ("bulk.tokens", (), '<p class="verdict bad" id="verdict">tokens differ</p>'),
        ("problems", ("Bulk: <2> positions",), "<li>Bulk: &lt;2&gt; positions</li>"),
        ("device", "cpu", "share its cores"),
        (
            "model",
            "m",
            "asynckv 0.1.0 · 2026-01-02 03:04 UTC · a CPU · Python 3.11.7, torch 2.1",
        ),
    ],
)
def test_the_page_says_what_a_run_came_to_and_nothing_becomes_markup(
    sample_report: DemoReport, path: str, value: Any, words: str
) -> None:
    assert words in render_page(changed(sample_report, path, value))


def changed(report: Any, path: str, value: Any) -> Any:
    """Return a report in which one field is another."""
    name, _, rest = path.partition(".")
    value = changed(getattr(report, name), rest, value) if rest else value
    return msgspec.structs.replace(report, **{name: value})


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_shows_the_page(
    sample_report: DemoReport, look_at: LookAt, dark: bool
) -> None:
    seen = look_at(render_page(sample_report), SEEN, dark=dark)
    assert seen["rows"] == 60
    assert seen["thinnest"] >= 0.5
    assert (seen["overflow"], seen["clipped"], seen["fetched"]) == (0, 0, 0)
    assert seen["text"] == sample_report.text
    assert seen["verdict"] == "every act generated the same tokens"
    paper, ink = seen["paper"], seen["ink"]
    assert (ink - paper if dark else paper - ink) > 500
    assert abs(seen["compute"] - paper) > 200


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_narrow_window_does_not_scroll_and_letters_are_as_large(
    sample_report: DemoReport, look_at: LookAt
) -> None:
    seen = look_at(render_page(sample_report), SEEN, dark=False, width=420)
    assert (seen["overflow"], seen["clipped"]) == (0, 0)
    assert seen["smallest"] > 10


def test_the_page_says_of_every_process_on_which_gpu_it_is(
    sample_report: DemoReport,
) -> None:
    page = render_page(changed(sample_report, "device", "cuda:0 (<H200>)"))
    assert page.count("cuda:0 (&lt;H200&gt;)") == 3


def test_the_page_compares_nothing_across_two_clocks(sample_report: DemoReport) -> None:
    page = render_page(sample_report)
    assert "sooner, " not in page and "times" not in page
    assert "25.0 ms before the prefill&#x27;s compute ended" in page


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


def test_a_layer_that_is_there_before_the_compute_ends_has_a_tail_below_zero(
    sample_report: DemoReport,
) -> None:
    assert round(sample_report.layerwise.tail_s, 6) == -0.025
    assert round(sample_report.bulk.tail_s, 6) == 0.11


def test_the_stages_of_a_first_token_add_up_from_the_request(
    sample_report: DemoReport,
) -> None:
    for one in (sample_report.bulk, sample_report.layerwise, sample_report.second):
        assert min(one.stages_s) >= 0.0
        assert sum(one.stages_s) == pytest.approx(one.first_token_s)
    assert sample_report.bulk.stages_s == pytest.approx((2.4, 0.11, 0.03))
    assert sample_report.layerwise.stages_s == pytest.approx((2.375, 0.0, 0.055))


def test_what_a_second_request_saves_may_be_nothing(sample_report: DemoReport) -> None:
    assert sample_report.second.saved_share == pytest.approx(0.9)
    slow = msgspec.structs.replace(sample_report.second, first_token_s=5.0)
    assert slow.saved_share == pytest.approx(-1.0)


def test_a_report_survives_json(sample_report: DemoReport) -> None:
    line = msgspec.json.encode(sample_report)
    assert msgspec.json.decode(line, type=DemoReport) == sample_report


def test_the_successor_s_tokens_count_too(sample_report: DemoReport) -> None:
    report = changed(sample_report, "survival.taken_over.tokens", ())
    assert sample_report.tokens_identical
    assert not report.tokens_identical


@pytest.mark.parametrize(
    ("write", "value", "words"),
    [
        (write_seconds, 0.0, "0.0 ms"),
        (write_seconds, 0.0134, "13.4 ms"),
        (write_seconds, 0.25, "250 ms"),
        (write_seconds, 2.4472, "2.45 s"),
        (write_bytes, 83_957_760, "84.0 MB"),
        (write_transport, "tcp, new payload", "new, control over tcp"),
    ],
)
def test_durations_bytes_and_transports_are_said_in_words(
    write: Callable[[Any], str], value: object, words: str
) -> None:
    assert write(value) == words


def test_all_ways_to_a_first_token_count_from_the_request(
    sample_report: DemoReport,
) -> None:
    sums = [sum(bar.stages_s) for bar in first_token_bars(sample_report)]
    assert sums == pytest.approx([2.45, 2.54, 2.43])


def test_a_tail_is_written_with_its_sign(sample_report: DemoReport) -> None:
    assert write_tail(sample_report.bulk).endswith("110 ms after the prefill's compute")
    assert "25.0 ms before" in write_tail(sample_report.layerwise)


def test_a_second_request_that_is_slower_is_called_later(
    sample_report: DemoReport,
) -> None:
    assert write_fall(sample_report.second).endswith("250 ms after the request "
        "instead of 2.50 s, 90% earlier")  # fmt: skip
    slow = msgspec.structs.replace(sample_report.second, first_token_s=5.0)
    assert write_fall(slow).endswith("100% later")


def test_payload_that_was_mapped_was_read_from_memory() -> None:
    assert write_transport("tcp, map payload").startswith("read from memory")


def test_the_figures_shout_when_tokens_differ(sample_report: DemoReport) -> None:
    report = changed(sample_report, "bulk.tokens", (1,))
    values = {figure.name: figure.value for figure in figures_of(report)}
    assert values["tokens identical"] == "NO"
