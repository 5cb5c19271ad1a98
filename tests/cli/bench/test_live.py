from __future__ import annotations

import io

import pytest
from rich.console import Console

from asynckv.cli.bench.command import BenchDisplay, closing_table
from asynckv.cli.bench.report import BenchReport


def shown(report: BenchReport, *, terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with BenchDisplay(console) as display:
        display.expect(len(report.rows), 200.0, 10.0)
        for row in report.rows:
            display.begin(row.subject.title, 6)
            display.advance(3)
            display.end(row)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_row_is_printed_with_its_baselines(sample_report: BenchReport) -> None:
    lines = shown(sample_report, terminal=False).splitlines()
    assert lines[6] == "<entry>  3 [2.7-3.3] GB/s  ok"
    assert lines[7].strip().startswith("1.1 times slower than raw TCP")
    assert lines[8].strip().startswith("5.3 times slower than memcpy")
    assert lines[-1].endswith("FAILED: PeerLost: the peer is gone")


def test_it_says_first_what_it_takes_and_what_else_there_is(
    sample_report: BenchReport,
) -> None:
    first = shown(sample_report, terminal=False).splitlines()[0]
    assert first.startswith("5 cases, about 3 minutes on an idle machine; --quick")
    assert "takes 10 s, --case NAME" in first


def test_a_table_closes_the_run(sample_report: BenchReport) -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(closing_table(sample_report))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    expected = "<entry> 3 GB/s 1.1 times slower than raw TCP ok"
    assert " ".join(lines[1].split()) == expected
    assert len(lines) == 6


@pytest.mark.parametrize("words", ["cases", "5/5", "3/6", "<entry>"])
def test_a_terminal_sees_how_it_goes_on(sample_report: BenchReport, words: str) -> None:
    assert words in shown(sample_report, terminal=True)


def test_no_bar_where_there_is_no_terminal(sample_report: BenchReport) -> None:
    assert "━" not in shown(sample_report, terminal=False)
