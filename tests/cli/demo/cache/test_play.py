"""What a play that fails leaves behind; the command's tests play a whole one."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from asynckv.cli.demo.cache.play import play_cache
from asynckv.cli.demo.cache.workload import Workload
from asynckv.cli.demo.live import LiveDisplay
from asynckv.cli.demo.processes import WorkerFailed


@pytest.mark.multiprocess
@pytest.mark.slow
async def test_a_model_that_cannot_be_loaded_ends_the_play_and_its_processes(
    tmp_path: Path,
    belonging_to: Callable[[Path], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    display = LiveDisplay(Console(file=io.StringIO()))
    with pytest.raises(WorkerFailed, match="no tokenizer that can be loaded"):
        await play_cache(str(tmp_path), Workload("", ()), tmp_path, display)
    assert belonging_to(tmp_path) == []
