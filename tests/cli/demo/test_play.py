from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(120)]

# Whatever a shell starts in the background ignores SIGINT, and so do its children.
HEED = ("env", "--default-signal=INT")
COMMAND = (sys.executable, "-u", "-m", "asynckv", "demo", "--model", "random-tiny")


def belonging_to(folder: Path) -> Iterator[int]:
    """The processes whose files go to ``folder``."""
    wanted = f"TMPDIR={folder}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                yield int(process.name)
        except OSError:
            continue  # it has just ended


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.chaos)]
)
def test_an_interrupted_demo_leaves_nothing_behind(
    tmp_path: Path, number: signal.Signals
) -> None:
    files = tmp_path / "files"
    files.mkdir()
    process = subprocess.Popen(
        [*HEED, *COMMAND, "--html", tmp_path / "page.html"],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(files), "COLUMNS": "200"},
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()  # the models are loaded, act 1 begins
        assert len([*belonging_to(files)]) == 3
        process.send_signal(number)
        output, _ = process.communicate(timeout=30)
    assert b"interrupted" in output
    assert process.returncode == 130
    assert [*belonging_to(files)] == []
    assert [*files.iterdir()] == []
    assert not (tmp_path / "page.html").exists()
