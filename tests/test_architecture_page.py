"""docs/architecture.md says where things are: they are there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_picture_is_that_of_the_imports() -> None:
    command = [sys.executable, str(ROOT / ".ci" / "architecture.py"), "--check"]
    subprocess.run(command, check=True)


def test_the_files_that_it_names_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    inner = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("asynckv/**/*.py")}
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", text))
    assert len(named) > 20
    missing = {one for one in named if not any(at.endswith(f"/{one}") for at in inner)}
    assert not missing
