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


def test_what_its_table_names_is_in_a_file_that_it_names_beside() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = text.partition("## Where is it?")[2].partition("## Which tests")[0]
    named = 0
    for row in rows.splitlines():
        words = re.findall(r"`([A-Z]\w+)(?:\.(\w+))?`", row)
        files = [
            path.read_text(encoding="utf-8")
            for one in re.findall(r"`((?:\w+/)*\w+\.py)`", row)
            for path in ROOT.glob(f"asynckv/**/{one}")
        ]
        for kind, method in words:
            named += 1
            found = [one for one in files if re.search(rf"\b{kind}\b", one)]
            assert found, f"{kind} is in none of the files of {row[:60]}"
            assert not method or any(f"def {method}(" in one for one in found), row
    assert named > 15
