from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asynckv.cli.bench.command import bench
from asynckv.cli.bench.report import FORMAT, BenchReport, Settings
from asynckv.cli.bench.rig import open_rig
from asynckv.cli.options import KeyOptions

COMMAND = (sys.executable, "-u", "-m", "asynckv", "bench")

# Whatever a shell starts in the background ignores SIGINT, and so do its children.
HEED = ("env", "--default-signal=INT")
INTERRUPTED = 130


BelongingTo = Callable[[Path], list[int]]


@contextlib.contextmanager
def started(
    folder: Path, *arguments: str | Path
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A bench whose files go to ``folder``, and the first line that it prints."""
    process = subprocess.Popen(
        [*HEED, *COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(folder), "COLUMNS": "200"},
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().decode()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.timeout(180)
@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_quick_bench_leaves_a_row_for_every_case(tmp_path: Path) -> None:
    report, page = tmp_path / "bench.json", tmp_path / "bench.html"
    done = subprocess.run(
        [*COMMAND, "--quick", "--json", report, "--html", page],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    found = msgspec.json.decode(report.read_bytes(), type=BenchReport)
    assert (found.format, found.own_server) == (FORMAT, True)
    assert all(row.baselines for row in found.rows)
    assert page.read_text(encoding="utf-8").count("<svg")


@pytest.mark.timeout(180)
@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.chaos)]
)
def test_an_interrupted_bench_leaves_nothing_behind(
    tmp_path: Path, number: signal.Signals, belonging_to: BelongingTo
) -> None:
    files, report = tmp_path / "files", tmp_path / "bench.json"
    files.mkdir()
    with started(files, "--quick", "--json", report) as (process, line):
        assert "16 cases, about" in line
        assert process.stdout is not None
        while b"64 KiB entry" not in process.stdout.readline():
            pass  # the first of many rows
        assert len(belonging_to(files)) == 2
        process.send_signal(number)
        output, errors = process.communicate(timeout=50)
    assert process.returncode == INTERRUPTED
    assert output.endswith(b"interrupted; nothing is left behind\n")
    assert errors == b""
    assert belonging_to(files) == []
    assert [*files.iterdir()] == []
    assert not report.exists()


@pytest.mark.timeout(180)
@pytest.mark.multiprocess
@pytest.mark.slow
def test_an_interrupted_serving_side_leaves_nothing_behind(
    tmp_path: Path, belonging_to: BelongingTo
) -> None:
    files, socket = tmp_path / "files", tmp_path / "bench"
    files.mkdir()
    with started(files, "--serve", f"unix://{socket}") as (process, line):
        assert asyncio.run(ping_at(line.split()[-1]))
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=50)
    assert process.returncode == INTERRUPTED
    assert (output, errors) == (b"interrupted; nothing is left behind\n", b"")
    assert belonging_to(files) == []
    assert [*files.iterdir()] == []
    assert not socket.exists()


async def ping_at(url: str) -> bool:
    async with open_rig(url, Settings()) as rig:
        return await rig.baselines.echo.ping(b"there") == b"there"


@pytest.mark.timeout(180)
@pytest.mark.multiprocess
@pytest.mark.slow
def test_the_serving_side_says_what_to_call_and_ends_when_told(tmp_path: Path) -> None:
    with started(tmp_path, "--serve") as (process, line):
        assert asyncio.run(ping_at(line.split()[-1]))
        process.send_signal(signal.SIGTERM)
        assert process.wait(50) == INTERRUPTED


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"url": "nonsense"}, "not a URL"),
        ({"keys": KeyOptions(certificate=Path("a.pem"))}, "belong together"),
        ({"case": ["nonsense"]}, "no case fits 'nonsense'"),
        ({"case": ["entri-1MiB"]}, "no case fits 'entri-1MiB'"),
        ({"shape": ["nonsense"]}, "'nonsense' is no shape"),
        ({"serve": True, "json": Path("a.json")}, "--serve takes no --json"),
        ({"json": Path("/nowhere/a.json")}, "there is no folder /nowhere"),
    ],
)
def test_options_that_cannot_be_honoured_are_errors(
    arguments: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = arguments.pop("url", None)
    assert bench(url, loop="asyncio", **arguments) == 1
    assert words in capsys.readouterr().out.replace("\n", " ")
