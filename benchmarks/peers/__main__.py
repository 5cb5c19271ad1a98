"""asynckv beside its peers: ``python -m benchmarks.peers zmq nixl``.

Each peer is measured by a process of its own, which is ended when it takes too long.
Its report goes to ``FOLDER/NAME.json``, also where it fails or is not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from asynckv.cli.process import run
from asynckv.links.options import cores, default_lanes
from benchmarks.peers.measuring import Options, run_peer
from benchmarks.peers.peer import KINDS, peers_of
from benchmarks.peers.report import PeerReport, write_report, write_summary

__all__ = ("main",)

_LIMIT_S = 300.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or write tables; return 1 if a peer has a reason not to be measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("peers", nargs="*", help=", ".join(KINDS))
    parser.add_argument("--folder", type=Path, default=Path(".cache/peers"))
    parser.add_argument("--rounds", type=int, default=6, help="even, for the A/A")
    parser.add_argument("--lanes", type=int, default=default_lanes(cores()))
    parser.add_argument("--lag-s", type=float, default=4.0)
    parser.add_argument("--limit-s", type=float, default=_LIMIT_S, help="for each peer")
    parser.add_argument("--quick", action="store_true", help="only shows that it works")
    parser.add_argument("--not-installed", action="store_true", help="only say so")
    parser.add_argument("--table", action="store_true", help="of the folder's reports")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.table:
        _write_tables(given.folder)
        return 0
    options = Options(
        rounds=given.rounds, lanes=given.lanes, lag_s=given.lag_s, quick=given.quick
    )
    if given.here:
        _measure_here(given.peers[0], options, given.folder)
        return 0
    reports = []
    for name in [one for chosen in given.peers for one in peers_of(chosen) or [chosen]]:
        if given.not_installed:
            reports.append(PeerReport(name, reason="it could not be installed"))
            _save(reports[-1], given.folder)
        else:
            reports.append(_measure_apart(name, given))
        print(write_report(reports[-1]), flush=True)
    return int(any(report.reason for report in reports))


def _measure_here(name: str, options: Options, folder: Path) -> None:
    try:
        run(run_peer(name, options, lambda report: _save(report, folder)))
    except Exception as exc:  # noqa: BLE001 - a peer may raise anything
        reason = f"{type(exc).__name__}: {exc}"
        _save(msgspec.structs.replace(_load(name, folder), reason=reason), folder)
        # Its threads may wait for ever.
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _measure_apart(name: str, given: argparse.Namespace) -> PeerReport:
    """Measure in another process; end it, and what it started, when it is late."""
    _path(name, given.folder).unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.peers", name, "--here"]
    for option in ("folder", "rounds", "lanes", "lag_s"):
        command += [f"--{option.replace('_', '-')}", str(getattr(given, option))]
    command += ["--quick"] * given.quick
    process = subprocess.Popen(command, start_new_session=True)
    reason = ""
    try:
        if status := process.wait(given.limit_s):
            reason = f"its process ended with status {status}"
    except subprocess.TimeoutExpired:
        reason = f"not done after {given.limit_s:.0f} s"
    finally:
        # Whatever is left of the session that it began.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    report = _load(name, given.folder)
    if reason and not report.reason:
        report = msgspec.structs.replace(report, reason=reason)
        _save(report, given.folder)
    return report


def _path(name: str, folder: Path) -> Path:
    return folder / f"{name}.json"


def _save(report: PeerReport, folder: Path) -> None:
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=1)
    _path(report.peer, folder).write_bytes(encoded)


def _load(name: str, folder: Path) -> PeerReport:
    try:
        encoded = _path(name, folder).read_bytes()
    except FileNotFoundError:
        return PeerReport(name)
    return msgspec.json.decode(encoded, type=PeerReport)


def _write_tables(folder: Path) -> None:
    reports = [_load(name, folder) for name in KINDS if _path(name, folder).exists()]
    print(write_summary(reports))
    for report in reports:
        print("\n" + write_report(report))


if __name__ == "__main__":
    sys.exit(main())
