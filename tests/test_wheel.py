from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
AROUND = """import pytest
import asynckv
from asynckv.testing import KVFaults, KVPair


def test_it_is_the_installed_one() -> None:
    assert asynckv.__file__.startswith({site!r})


@pytest.mark.asyncio
@pytest.mark.parametrize("snippet", range({count}))
async def test_on_the_page(
    kv_faults: KVFaults, kv_tcp_pair: KVPair, snippet: int
) -> None:
    server = kv_tcp_pair.server
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel of this checkout is installed, and nothing else."""
    pytest.importorskip("hatchling", reason="the extra test brings it")
    made, site = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("site")
    build = ("hatchling", "build", "-t", "wheel", "-d", str(made))
    subprocess.run([sys.executable, "-m", *build], cwd=ROOT, check=True)
    (wheel,) = made.glob("asynckv-*.whl")
    # What an installer does with one that is of Python alone.
    zipfile.ZipFile(wheel).extractall(site)
    return site


def code_of_the_page(site: Path) -> tuple[str, str]:
    """Return the whole example of docs/testing.md, and a test of its other snippets."""
    page = (ROOT / "docs" / "testing.md").read_text()
    whole, *rest = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    code = AROUND.format(site=str(site), count=len(rest))
    for number, snippet in enumerate(rest):
        code += f"    if snippet == {number}:\n" + textwrap.indent(snippet, " " * 8)
    return whole, code


@pytest.mark.slow
@pytest.mark.multiprocess
def test_what_the_page_on_testing_shows_runs_where_the_wheel_is_installed(
    site: Path, tmp_path: Path
) -> None:
    for name, code in zip(("whole", "rest"), code_of_the_page(site), strict=True):
        (tmp_path / f"test_{name}.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert re.search(r"^10 passed", done.stdout, re.MULTILINE), done.stdout


def test_the_wheel_holds_the_kit_and_no_harness(site: Path) -> None:
    modules = [path.relative_to(site) for path in site.rglob("*.py")]
    assert {path.parts[0] for path in modules} == {"asynckv"}
    kit = [path for path in modules if path.parts[1] == "testing"]
    assert len(kit) <= 30
