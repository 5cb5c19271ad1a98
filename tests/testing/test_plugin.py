from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ASKS_FOR_NOTHING = """
import sys

def test_is_light():
    heavy = {"torch", "numpy", "msgspec", "xxhash", "anyio", "asynckv.buffers"}
    assert not heavy & set(sys.modules)
"""
ASKS_FOR_IT = """
def test_uses(kv_pair): ...
"""
ALONE = ("--disable-plugin-autoload", "-p", "asynckv.testing.plugin")


@pytest.fixture
def installed(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package's entry points be found, as those of an installed one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = pytester.mkdir("site") / "asynckv-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: asynckv\nVersion: 0\n"
    )
    points = project["entry-points"]["pytest11"]
    lines = [f"{name} = {module}" for name, module in points.items()]
    (folder / "entry_points.txt").write_text("\n".join(["[pytest11]", *lines]))
    monkeypatch.setenv("PYTHONPATH", f"{folder.parent}:{ROOT}")


def test_it_imports_nothing_before_a_fixture_is_asked_for(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(ASKS_FOR_NOTHING)
    with_asyncio = (*ALONE, "-p", "pytest_asyncio.plugin")
    for plugins in (ALONE, with_asyncio):
        pytester.runpytest_subprocess(*plugins).assert_outcomes(passed=1)


def test_without_pytest_asyncio_there_are_no_fixtures(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(ASKS_FOR_IT)
    result = pytester.runpytest_subprocess(*ALONE)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*fixture 'kv_pair' not found"])


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("asked_for", [(), ("-p", "asynckv.testing.plugin")])
def test_an_installed_package_brings_it_once(
    pytester: pytest.Pytester, asked_for: tuple[str, ...]
) -> None:
    pytester.makeconftest('pytest_plugins = ["asynckv.testing.plugin"]')
    result = pytester.runpytest_subprocess("--trace-config", *asked_for)
    listed = r"^ +(\S+?) *: .*/asynckv/testing/(\w+)\.py$"
    assert re.findall(listed, result.stdout.str(), re.MULTILINE) == [
        ("asynckv.testing.plugin", "plugin"),
        ("asynckv.testing.fixtures", "fixtures"),
    ]


@pytest.mark.usefixtures("installed")
def test_it_can_be_left_out(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(ASKS_FOR_IT)
    result = pytester.runpytest_subprocess("-p", "no:asynckv.testing.plugin")
    result.stdout.fnmatch_lines(["*fixture 'kv_pair' not found"])
