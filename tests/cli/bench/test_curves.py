from __future__ import annotations

import msgspec

from asynckv.cli.bench.page import lag_bars, latency_lines, throughput_lines
from asynckv.cli.bench.report import BenchReport


def test_throughput_is_drawn_beside_raw_tcp_and_memcpy(
    sample_report: BenchReport,
) -> None:
    lines = throughput_lines(sample_report)
    assert [line.name for line in lines] == ["asynckv", "raw TCP", "memcpy"]
    assert [[point.x for point in line.points] for line in lines] == [
        [2**20, 2**26],
        [2**20, 2**26],
        [2**26],
    ]


def test_of_several_raw_baselines_the_first_is_drawn(
    sample_report: BenchReport,
) -> None:
    entry = sample_report.rows[0]
    first = entry.baselines[0]
    one_stream = msgspec.structs.replace(first, name="raw TCP, 1 stream", is_void=True)
    row = msgspec.structs.replace(entry, baselines=(first, one_stream))
    report = msgspec.structs.replace(sample_report, rows=(row,))
    (point,) = throughput_lines(report)[1].points
    assert point.is_sure


def test_points_of_void_rows_are_not_sure(sample_report: BenchReport) -> None:
    ours = throughput_lines(sample_report)[0]
    assert [point.is_sure for point in ours.points] == [False, True]


def test_each_contender_has_its_median_and_its_tail(sample_report: BenchReport) -> None:
    lines = latency_lines(sample_report)
    assert [line.name for line in lines] == [
        "asynckv, p50",
        "asynckv, p99",
        "streams, p50",
        "streams, p99",
    ]
    assert [line.points[0].value.median for line in lines] == [0.21, 0.42, 0.21, 0.42]


def test_lag_is_drawn_busy_and_idle(sample_report: BenchReport) -> None:
    names = [bars.name for bars in lag_bars(sample_report)]
    assert names == ["while payload moves", "idle loop"]


def test_a_report_without_rows_has_no_points(sample_report: BenchReport) -> None:
    report = msgspec.structs.replace(sample_report, rows=())
    lines = throughput_lines(report) + latency_lines(report)
    assert not any(line.points for line in lines)
    assert lag_bars(report) == []
