from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from asynckv.cli.demo.live import LiveDisplay
from asynckv.cli.demo.models import DemoPrompt
from asynckv.cli.demo.play import Programs, play_demo

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(120)]

# Whatever a shell starts in the background ignores SIGINT, and so do its children.
HEED = ("env", "--default-signal=INT")
COMMAND = (sys.executable, "-u", "-m", "asynckv", "demo", "--model", "random-tiny")


ON_A_FAKE_GPU = """
from asynckv.cli.demo.{role} import main
from asynckv.cli.demo.place import Place
from harness.fake_devices import fake_device_of
from harness.fake_gpus import FakeGpus
gpu = fake_device_of(FakeGpus().process())
main(lambda name: Place("cpu", gpu.device))
"""


def belonging_to(folder: Path) -> Iterator[int]:
    """The processes whose files go to ``folder``."""
    wanted = f"TMPDIR={folder}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                yield int(process.name)
        except OSError:
            continue  # it has just ended


@pytest.mark.chaos
async def test_all_acts_play_with_buffers_on_one_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for role in ("prefill", "decode"):
        program = ON_A_FAKE_GPU.format(role=role)
        (tmp_path / f"{role}_on_gpu.py").write_text(program, encoding="utf-8")
    prompt = DemoPrompt(60 * "a tale ", "What?", "Who?")
    (tmp_path / "prompt").write_bytes(msgspec.json.encode(prompt))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    display = LiveDisplay(Console(file=io.StringIO()))
    programs = Programs("prefill_on_gpu", "decode_on_gpu")
    report = await play_demo(
        "random", tmp_path, display, device="cuda:0", programs=programs
    )
    assert report.problems == () and report.tokens_identical
    assert report.transport == "tcp, cuda_ipc payload" and report.device == "cuda:0"


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
        process.stdout.readline()  # both processes were started
        assert len([*belonging_to(files)]) == 3
        process.send_signal(number)
        output, _ = process.communicate(timeout=30)
    assert b"interrupted" in output
    assert process.returncode == 130
    assert [*belonging_to(files)] == []
    assert [*files.iterdir()] == []
    assert not (tmp_path / "page.html").exists()
