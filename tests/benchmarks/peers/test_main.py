from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.peers.__main__ import main
from benchmarks.peers.report import OFF, PeerReport


def report_of(name: str, folder: Path) -> PeerReport:
    return msgspec.json.decode((folder / f"{name}.json").read_bytes(), type=PeerReport)


def test_what_could_not_be_installed_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--folder", str(tmp_path), "--not-installed", "nixl"]) == 1
    for name in ("nixl", "nixl-tcp"):
        assert report_of(name, tmp_path).reason == "it could not be installed"
    assert main(["--folder", str(tmp_path), "--table"]) == 0
    assert "nixl-tcp: it could not be installed" in capsys.readouterr().out


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_peer_whose_package_is_not_there_says_so(tmp_path: Path) -> None:
    assert main(["--folder", str(tmp_path), "--quick", "mooncake"]) == 1
    assert "No module named 'mooncake'" in report_of("mooncake", tmp_path).reason


@pytest.mark.multiprocess
def test_a_peer_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    options = ["--folder", str(tmp_path), "--limit-s", "0.01"]
    assert main([*options, "anyio"]) == 1
    assert report_of("anyio", tmp_path).reason.startswith("not done after")


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.chaos
def test_a_quick_run_measures_every_work(tmp_path: Path) -> None:
    options = ["--quick", "--rounds", "2", "--lanes", "1", "--lag-s", "0.1"]
    assert main(["--folder", str(tmp_path), *options, "anyio"]) == 0
    report = report_of("anyio", tmp_path)
    rows = [by_name[OFF] for by_name in report.rows]
    assert [row.subject.case for row in rows] == ["layers", "once", "blocks", "ping"]
    assert all(row.verdict != "failed" for row in rows)
    assert set(report.lags) == {"idle loop", "asynckv off", "asynckv full", "peer"}
