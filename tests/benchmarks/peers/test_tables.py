from __future__ import annotations

import pytest

from benchmarks.peers.pairing import AGAIN, PEER, RAW, Turn, lag_of, row_of
from benchmarks.peers.report import Machine, PeerReport, Row
from benchmarks.peers.tables import write_report, write_summary
from benchmarks.peers.work import Work

WORK = Work("layers", "two layers", 2, 500_000_000, 500_000_000)


def row(again: float = 1.0) -> Row:
    turns = {
        RAW: Turn(1.0, 0.3),
        "asynckv off": Turn(0.8, 0.25),
        "asynckv full": Turn(1.25, 0.35),
        PEER: Turn(2.4, 0.9),
        "memcpy": Turn(0.1),
        AGAIN: Turn(again, 0.3),
    }
    return row_of(WORK, [turns])


@pytest.fixture
def report() -> PeerReport:
    return PeerReport(
        peer="zmq",
        how="frames",
        versions={"pyzmq": "27"},
        machine=Machine(2, "3.11", "2.13", 0.5),
        ours="TCP, 4 lanes",
        rows=(row(), Row("once", "one", "failed", "OSError: gone")),
        lags={"asynckv off": lag_of([1.5]), PEER: lag_of([29.0])},
    )


def test_a_summary_has_a_line_for_each_peer(report: PeerReport) -> None:
    lines = write_summary([report]).splitlines()
    assert lines[0].startswith("| peer | two layers | one |")
    assert lines[2] == "| zmq | 3 | failed | 1.5, 29 | 0.25, 0.90 |"


def test_a_summary_sets_what_is_void_in_brackets() -> None:
    lines = write_summary([PeerReport("zmq", rows=(row(again=2.0),))]).splitlines()
    assert lines[2].startswith("| zmq | (3) |")


def test_a_peer_that_was_not_measured_has_its_line_and_its_reason(
    report: PeerReport,
) -> None:
    missing = PeerReport("nixl", reason="it could not be installed")
    text = write_summary([report, missing])
    assert "| nixl | not measured | not measured |" in text
    assert text.endswith("nixl: it could not be installed")


def test_a_report_has_every_ratio_and_figure(report: PeerReport) -> None:
    cells = write_report(report).splitlines()[7].split(" | ")
    assert cells[1:3] == ["3 [3-3]", "1.92 [1.92-1.92]"]
    assert cells[3:5] == ["1.25 [1.25-1.25]", "0.417 [0.417-0.417]"]
    assert cells[5:9] == ["1.00", "1.25 GB/s", "0.417 GB/s", "1 GB/s"]
    assert cells[9] == "10 GB/s"
    assert cells[10] == "0.25, 0.35, 0.90, 0.30 |"


def test_a_report_says_what_failed_and_what_is_void(report: PeerReport) -> None:
    assert "failed: OSError: gone" in write_report(report)
    assert "**VOID**" in write_report(PeerReport("zmq", rows=(row(again=2.0),)))
    assert "no such thing" in write_report(PeerReport("x", reason="no such thing"))
