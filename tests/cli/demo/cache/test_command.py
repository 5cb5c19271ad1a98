"""The whole demo as a process: what it finds, how it fails, what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asynckv.cli.demo.command import demo_cache

COMMAND = (sys.executable, "-u", "-m", "asynckv", "demo", "cache")
TINY = ("--model", "random-tiny")
# Whatever a shell starts in the background ignores SIGINT, and so do its children.
HEED = ("env", "--default-signal=INT")

BelongingTo = Callable[[Path], list[int]]


@pytest.mark.chaos
@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_store_is_shared_and_its_disk_outlives_a_kill(tmp_path: Path) -> None:
    page = tmp_path / "cache.html"
    done = subprocess.run(
        [*COMMAND, *TINY, "--html", page, "--json"], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    report = json.loads(done.stdout)
    assert report["tokens_identical"] and report["problems"] == []
    assert report["shared"][0]["found_tokens"] == 0
    assert all(one["found_tokens"] for one in report["shared"][1:6])
    assert report["hit_rate_shared"] > report["hit_rate_alone"] > 0
    assert report["restarted"][0]["by_tier"] == {"disk": 3}
    assert f"{report['document_ratio']:.0%} of the " in page.read_text("utf-8")


@pytest.mark.chaos
@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_interrupted_demo_leaves_nothing_behind(
    tmp_path: Path, belonging_to: BelongingTo
) -> None:
    (files := tmp_path / "files").mkdir()
    process = subprocess.Popen(
        [*HEED, *COMMAND, *TINY, "--html", tmp_path / "page.html"],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(files), "COLUMNS": "200"},
    )
    with process:
        assert process.stdout is not None
        assert b"start two engines" in process.stdout.readline()
        assert len(belonging_to(files)) == 3
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert b"interrupted" in output and process.returncode == 130
    assert belonging_to(files) == []
    assert [*files.iterdir()] == [] and [*tmp_path.iterdir()] == [files]


@pytest.mark.parametrize(
    ("options", "words"),
    [({"model": ""}, "config.json"), ({"html": "missing/page.html"}, "cannot write")],
)
def test_what_cannot_be_played_is_an_error_before_any_process_starts(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, str],
    words: str,
) -> None:
    monkeypatch.setattr(sys, "executable", "none")  # nothing can be started
    monkeypatch.setenv("COLUMNS", "500")
    given: dict[str, Any] = {"model": "random-tiny", "html": tmp_path / "page.html"}
    given |= {name: tmp_path / value for name, value in options.items()}
    assert demo_cache(model=str(given["model"]), html=given["html"]) == 1
    out = capsys.readouterr().out
    assert words in out and len(out.splitlines()) == 1
