"""Millions of hostile inputs, and none that breaks a promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.trust,
    pytest.mark.longest,
    pytest.mark.multiprocess,
    pytest.mark.timeout(7200),
]


def test_no_hostile_input_breaks_a_promise(
    tmp_path: Path, scale: Any, figures: Callable[[str], None]
) -> None:
    command = (
        *(sys.executable, "-m", "harness.fuzzing"),
        *("--inputs", str(scale.fuzz_inputs)),
        *("--processes", str(os.cpu_count() or 1)),
        *("--findings", str(tmp_path)),
    )
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    total = re.search(r"^([\d,]+) inputs in .*", ran.stdout, re.MULTILINE)
    assert total is not None
    figures(total[0])
    assert int(total[1].replace(",", "")) >= scale.fuzz_inputs
