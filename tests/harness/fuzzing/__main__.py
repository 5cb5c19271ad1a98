"""Fuzz asynckv's protocol, or try again what a run has found.

``python -m harness.fuzzing --inputs 20000000 --processes 2`` and
``python -m harness.fuzzing --replay fuzz-findings/wire-1a2b3c4d.txt``.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from harness.fuzzing.fuzzer import Failing, Report, fuzz, replay
from harness.fuzzing.recording import Recording
from harness.fuzzing.scenes import record

__all__ = ("main",)


def main() -> None:
    """Run as told, say what came of it, and exit 1 if there was a finding."""
    options = _parser().parse_args()
    if options.replay is not None:
        replay(options.replay)
        sys.stdout.write("nothing is wrong with it any more\n")
    elif options.recording is not None:
        _run(options.seed, options.inputs, options.recording, options.report)
    else:
        _run_all(options.seed, options.inputs, options.processes, options.findings)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--replay", type=Path, metavar="FILE")
    # Of the processes that this one starts.
    parser.add_argument("--recording", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    return parser


def _run(seed: int, inputs: int, recording: Path, report: Path) -> None:
    said = Recording.load(recording).control()
    report.write_bytes(msgspec.msgpack.encode(fuzz(seed, inputs, said)))


def _run_all(seed: int, inputs: int, processes: int, findings: Path) -> None:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder, "recording")
        asyncio.run(record()).save(recording)
        reports = [Path(folder, f"report-{n}") for n in range(processes)]
        children = [
            subprocess.Popen(
                (
                    *(sys.executable, "-m", "harness.fuzzing"),
                    *("--seed", str(seed + number)),
                    *("--inputs", str(-(-inputs // processes))),
                    *("--recording", str(recording), "--report", str(report)),
                )
            )
            for number, report in enumerate(reports)
        ]
        failed = [child.wait() for child in children]
        if any(failed):
            raise SystemExit(f"a process of the run has failed: {failed}")
        whole = _sum([_read(report) for report in reports])
    whole.seconds = time.perf_counter() - started
    _notify(whole, findings)


def _read(report: Path) -> Report:
    return msgspec.msgpack.decode(report.read_bytes(), type=Report)


def _sum(reports: list[Report]) -> Report:
    whole = Report()
    for report in reports:
        for name, count in report.inputs.items():
            whole.inputs[name] = whole.inputs.get(name, 0) + count
        for failing in report.failing.values():
            whole.add(failing)
        whole.processor_s += report.processor_s
        whole.slowest_s = max(whole.slowest_s, report.slowest_s)
        whole.most_held_bytes = max(whole.most_held_bytes, report.most_held_bytes)
    return whole


def _notify(report: Report, findings: Path) -> None:
    say = sys.stdout.write
    for name, count in sorted(report.inputs.items()):
        say(f"{name:10} {count:12,} inputs\n")
    say(
        f"{report.total:,} inputs in {report.seconds:.1f} s, "
        f"{report.total / report.seconds:,.0f} a second "
        f"({report.total / report.processor_s:,.0f} a second of one processor); "
        f"the slowest took {1000 * report.slowest_s:.1f} ms, "
        f"the most that was held were {report.most_held_bytes:,} bytes\n"
    )
    for failing in report.failing.values():
        _tell_of(failing, findings)
    if report.failing:
        raise SystemExit(f"{len(report.failing)} kinds of inputs broke a promise")


def _tell_of(failing: Failing, findings: Path) -> None:
    path = failing.save(findings)
    say = sys.stdout.write
    say(f"\n{failing.kind}, {failing.seed}:\n{failing.error}\n")
    say(f"again: python -m harness.fuzzing --replay {path}\n")


if __name__ == "__main__":
    main()
