"""What is told here happens in a function that claims to be a package's own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import audit_hook
from harness.audit_hook import Listener

OURS = "/made/up/module.py"
DOES_IT = compile("eval('1 + 1')", OURS, "exec")


@pytest.fixture
def told() -> Iterator[list[str]]:
    told: list[str] = []
    listener = Listener("/made/up/", told.append)
    listener.begin()
    yield told
    listener.end()


def test_it_tells_what_and_where(told: list[str]) -> None:
    exec(DOES_IT)  # noqa: S102 - this is a test of that
    assert told == [f"{what} for {OURS}:1" for what in ("compile", "exec")]


@pytest.mark.multiprocess
def test_a_process_that_was_told_so_from_its_start_reports(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import runpy\nhook = runpy.run_path({audit_hook.__file__!r})\n"
        f"hook['report_to']({str(tmp_path)!r}, '/made/up/')"
    )
    code = f"""exec(compile("eval('1 + 1')", {OURS!r}, "exec"))"""
    command = [sys.executable, "-c", code]
    ran = subprocess.run(
        command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, check=True
    )
    assert ran.stderr == b""
    (report,) = tmp_path.glob("*.found")
    assert report.read_text().splitlines() == [
        f"{what} for {OURS}:1" for what in ("compile", "exec")
    ]
