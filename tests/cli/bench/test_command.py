from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from asynckv.cli.bench.command import bench
from asynckv.cli.bench.report import FORMAT, BenchReport
from asynckv.cli.bench.rig import open_rig
from asynckv.cli.bench.settings import Settings

COMMAND = (sys.executable, "-m", "asynckv", "bench")


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
    assert page.read_text(encoding="utf-8").count("<svg") == 3


async def ping_at(url: str) -> int:
    async with open_rig(url, Settings()) as rig:
        return len(await rig.in_thread(rig.raw.ping, 3))


@pytest.mark.multiprocess
@pytest.mark.slow
def test_the_serving_side_says_what_to_call_and_ends_when_told() -> None:
    process = subprocess.Popen([*COMMAND, "--serve"], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        assert asyncio.run(ping_at(line.split()[-1])) == 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 130
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"url": "nonsense"}, "not a URL"),
        ({"certificate": Path("a.pem")}, "belong together"),
    ],
)
def test_options_that_cannot_be_honoured_are_errors(
    arguments: dict[str, str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = arguments.pop("url", None)
    assert bench(url, **arguments) == 1  # type: ignore[arg-type]
    assert words in capsys.readouterr().out.replace("\n", " ")
