from __future__ import annotations

import pytest

from asynckv.cli.bench.report import Machine, Spread
from benchmarks.peers.report import (
    AGAIN,
    PEER,
    RAW,
    PeerReport,
    Row,
    Turn,
    in_turns,
    lag_of,
    row_of,
    write_report,
    write_summary,
)
from benchmarks.peers.work import Work

WORK = Work("layers", "two layers", 2, 500_000_000, 500_000_000)


def iteration(
    ours: float, peer: float, raw: float = 1.0, again: float = 1.0
) -> dict[str, Turn]:
    return {
        RAW: Turn(raw, 0.2),
        "asynckv off": Turn(ours, 0.5),
        PEER: Turn(peer, 2.0),
        "memcpy": Turn(0.1, 0.1),
        AGAIN: Turn(again, 0.4),
    }


def test_the_baseline_comes_first_and_last_and_the_others_to_and_fro() -> None:
    assert in_turns(["x", "y", "z"], 4) == [RAW, "x", "y", "z", AGAIN]
    assert in_turns(["x", "y", "z"], 5) == [RAW, "z", "y", "x", AGAIN]


def test_a_ratio_is_of_speeds_and_of_its_own_iteration() -> None:
    row = row_of(WORK, [iteration(1, 2), iteration(10, 40), iteration(1, 3)])
    assert row.ratios["asynckv off / peer"] == Spread(3.0, 2.0, 4.0)


def test_beside_the_baseline_stands_the_mean_of_its_two_turns() -> None:
    row = row_of(WORK, [iteration(2, 4, raw=1, again=3)] * 2)
    assert row.ratios["asynckv off / raw TCP"] == Spread(1.0, 1.0, 1.0)
    assert row.ratios["peer / raw TCP"] == Spread(0.5, 0.5, 0.5)
    assert row.contenders[RAW].elapsed_us.median == pytest.approx(2e6)


def test_memcpy_has_figures_but_no_ratio() -> None:
    row = row_of(WORK, [iteration(1, 2)])
    assert row.contenders["memcpy"].gb_per_s.median == pytest.approx(10.0)
    assert not [name for name in row.ratios if "memcpy" in name]


def test_cpu_is_counted_in_seconds_a_gigabyte() -> None:
    row = row_of(WORK, [iteration(1, 2), iteration(1, 2)])
    assert row.contenders["asynckv off"].cpu_s_per_gb == pytest.approx(0.5)
    assert row.contenders[RAW].cpu_s_per_gb == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("again", "verdict"), [(1.17, "ok"), (1.18, "void"), (0.88, "ok"), (0.86, "void")]
)
def test_a_baseline_that_differs_from_itself_voids_the_row(
    again: float, verdict: str
) -> None:
    # The one that is slower changes place with the order of division.
    iterations = [iteration(1, 2, 1, again), iteration(1, 2, again, 1)] * 3
    row = row_of(WORK, iterations)
    assert row.verdict == verdict
    assert bool(row.reason) == (verdict == "void")


def test_what_only_a_turn_s_place_does_voids_nothing() -> None:
    row = row_of(WORK, [iteration(1, 2, raw=1, again=2)] * 6)
    assert row.verdict == "ok"
    assert row.a_a == pytest.approx(1.0)


def test_no_iterations_are_no_row() -> None:
    with pytest.raises(ValueError, match="no iterations"):
        row_of(WORK, [])


def test_a_lag_is_the_p99_and_the_most_of_all_ticks() -> None:
    lag = lag_of([0.5] * 98 + [7.0, 9.0])
    assert (lag.ticks, lag.p99_ms, lag.most_ms) == (100, 9.0, 9.0)


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
        machine=Machine("Linux", "a processor", 2, 0.5, "3.11", "2.13", "a loop"),
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
