from __future__ import annotations

from collections.abc import Mapping

import pytest

from asynckv.cli.bench.report import Machine, Row, Subject, percentiles_of
from asynckv.cli.bench.rounds import Round, Sample
from benchmarks.peers.report import (
    FULL,
    MEMCPY,
    OFF,
    PEER,
    RAW,
    PeerReport,
    rows_of,
    write_report,
    write_summary,
)

GIGABYTE = 10**9
WORK = Subject("layers", "two layers", "throughput", "GB/s", True, GIGABYTE)
PING = Subject("ping", "a ping", "throughput", "us", False, 64)


def sample(value: float, cpu_s: float = 0.0) -> Sample:
    return Sample(value, GIGABYTE, cpu_s=cpu_s)


def rows(again: float = 1.0, subject: Subject = WORK) -> Mapping[str, Row]:
    """Return what one round came to: 1.25 GB/s beside 0.5 of the peer."""
    beside = {
        RAW: (sample(1.0, 0.3), sample(again, 0.3)),
        PEER: (sample(0.5, 0.9), sample(0.5, 0.9)),
        FULL: (sample(0.75, 0.35), sample(0.85, 0.35)),
        MEMCPY: (sample(10.0, 0.1), sample(10.0, 0.1)),
    }
    return rows_of(subject, [Round(sample(1.25, 0.25), beside)])


@pytest.fixture
def report() -> PeerReport:
    lost = Subject("once", "one", "throughput", "GB/s", True, 64)
    return PeerReport(
        peer="zmq",
        how="frames",
        versions={"pyzmq": "27"},
        machine=Machine("Linux", "a processor", 2, 0.5, "3.11", "2.13", "a loop"),
        ours="TCP, 4 lanes",
        rows=(rows(), {OFF: Row(lost, "failed", reason="OSError: gone")}),
        lags={OFF: percentiles_of([1.5]), PEER: percentiles_of([29.0])},
    )


def test_a_baseline_that_differs_from_itself_voids_the_rows() -> None:
    assert {name: row.verdict for name, row in rows(again=2.0).items()} == {
        **dict.fromkeys((OFF, FULL, PEER), "void")
    }


def test_a_summary_has_a_line_for_each_peer(report: PeerReport) -> None:
    lines = write_summary([report]).splitlines()
    assert lines[0].startswith("| peer | two layers | one |")
    assert lines[2] == "| zmq | 2.5 | failed | 1.5, 29 | 0.25, 0.90 |"


def test_a_summary_sets_what_is_void_in_brackets() -> None:
    lines = write_summary([PeerReport("zmq", rows=(rows(again=2.0),))]).splitlines()
    assert lines[2].startswith("| zmq | (2.5) |")


def test_a_peer_that_was_not_measured_has_its_line_and_its_reason(
    report: PeerReport,
) -> None:
    missing = PeerReport("nixl", reason="it could not be installed")
    text = write_summary([report, missing])
    assert "| nixl | not measured | not measured |" in text
    assert text.endswith("nixl: it could not be installed")


def test_a_report_has_every_ratio_and_figure(report: PeerReport) -> None:
    cells = write_report(report).splitlines()[7].split(" | ")
    assert cells[1:3] == ["2.5 [2.5-2.5]", "1.6 [1.6-1.6]"]
    assert cells[3:5] == ["1.25 [1.25-1.25]", "0.5 [0.5-0.5]"]
    assert cells[5:10] == ["1.00", "1.25 GB/s", "0.5 GB/s", "1 GB/s", "10 GB/s"]
    assert cells[10] == "0.25, 0.35, 0.90, 0.30 |"


def test_of_a_ping_less_is_faster_and_no_cpu_is_said() -> None:
    cells = write_report(PeerReport("zmq", rows=(rows(subject=PING),))).splitlines()
    ratios = cells[6].split(" | ")
    assert ratios[1] == "0.4 [0.4-0.4]" and ratios[6] == "1.25 us"
    assert ratios[10] == " |"


def test_a_report_says_what_failed_and_what_is_void(report: PeerReport) -> None:
    assert "failed: OSError: gone" in write_report(report)
    assert "**VOID**" in write_report(PeerReport("zmq", rows=(rows(again=2.0),)))
    assert "no such thing" in write_report(PeerReport("x", reason="no such thing"))
