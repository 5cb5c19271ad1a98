from __future__ import annotations

import io

import pytest
from rich.console import Console

from asynckv.cli.bench.live import BenchDisplay
from asynckv.cli.bench.report import BenchReport


def shown(report: BenchReport, *, terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with BenchDisplay(console) as display:
        display.expect(len(report.rows))
        for row in report.rows:
            display.begin(row.subject.title, 5)
            display.advance(3)
            display.end(row)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_row_is_printed_with_its_baselines(sample_report: BenchReport) -> None:
    lines = shown(sample_report, terminal=False).splitlines()
    assert lines[0] == "<entry>  3 [2.7-3.3] GB/s  ok"
    assert lines[1].strip().startswith("0.91")
    assert lines[2].strip().startswith("0.19")
    assert lines[-1].endswith("FAILED: PeerLost: the peer is gone")


@pytest.mark.parametrize("words", ["cases", "5/5", "3/6", "<entry>"])
def test_a_terminal_sees_how_it_goes_on(sample_report: BenchReport, words: str) -> None:
    assert words in shown(sample_report, terminal=True)


def test_no_bar_where_there_is_no_terminal(sample_report: BenchReport) -> None:
    assert "━" not in shown(sample_report, terminal=False)
