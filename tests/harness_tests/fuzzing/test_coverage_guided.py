from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from harness.fuzzing.coverage_guided import main

_is_here = importlib.util.find_spec("atheris") is not None
needs_atheris = pytest.mark.skipif(not _is_here, reason="atheris is not installed")


@pytest.mark.skipif(_is_here, reason="atheris is installed")
def test_without_atheris_it_says_so() -> None:
    with pytest.raises(SystemExit, match="pip install atheris"):
        main(["wire"])


@needs_atheris
@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("target", ["wire", "greeting", "manifest"])
def test_it_finds_nothing_in_a_few_runs(target: str) -> None:
    command = (sys.executable, "-m", "harness.fuzzing.coverage_guided", target)
    ran = subprocess.run((*command, "-runs=1000"), capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr.decode()


@needs_atheris
@pytest.mark.multiprocess
@pytest.mark.slow
def test_it_knows_its_targets() -> None:
    command = (sys.executable, "-m", "harness.fuzzing.coverage_guided", "none")
    ran = subprocess.run(command, capture_output=True, check=False)
    assert b"name one of these first: wire" in ran.stderr
