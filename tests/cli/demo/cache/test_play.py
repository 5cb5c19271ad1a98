"""What a play that fails leaves behind; the command's tests play a whole one."""

from __future__ import annotations

import io
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from asynckv.cli.demo.cache.play import play_cache
from asynckv.cli.demo.cache.report import read_workload
from asynckv.cli.demo.live import LiveDisplay
from asynckv.cli.demo.processes import WorkerEnded


class Killing(LiveDisplay):
    """Kills the first engine when the chat begins."""

    def end(self, outcome: str) -> None:
        if found := re.match(r"(\d+) and \d+", outcome):
            self.victim = int(found[1])

    def begin(self, title: str) -> None:
        if title.endswith("a chat"):
            os.kill(self.victim, signal.SIGKILL)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_killed_engine_ends_the_play_and_all_its_processes(
    tmp_path: Path,
    belonging_to: Callable[[Path], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    display = Killing(Console(file=io.StringIO()))
    with pytest.raises(WorkerEnded, match=r"process \d+ ended with status -9"):
        await play_cache("random-tiny", WORKLOAD, tmp_path, display)
    assert belonging_to(tmp_path) == []


WORKLOAD = read_workload()
