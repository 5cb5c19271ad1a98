"""The example tier, installed as its package says, and a Mooncake Store for it."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from asynckv.abc import StoreTier
from harness.mooncake_servers import MooncakeServers, running_mooncake, why_no_mooncake

EXAMPLE = Path(__file__).parents[2] / "examples" / "mooncake_tier"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the example is installed, and nothing else."""
    pytest.importorskip("hatchling", reason="the extra test brings it")
    made, site = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("site")
    build = ("hatchling", "build", "-t", "wheel", "-d", str(made))
    subprocess.run([sys.executable, "-m", *build], cwd=EXAMPLE, check=True)
    (wheel,) = made.glob("mooncake_tier-*.whl")
    # What an installer does with one that is of Python alone.
    zipfile.ZipFile(wheel).extractall(site)
    return site


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site))


@pytest.fixture
def opened_by(installed: None) -> Callable[[str], StoreTier]:
    """What the package's entry point names: it is found by reading files."""
    (entry,) = importlib.metadata.entry_points(group="asynckv.tiers", name="mooncake")
    opened_by: Callable[[str], StoreTier] = entry.load()
    return opened_by


@pytest.fixture
def mooncake(installed: None) -> None:
    """Skip a test where no Mooncake Store can be started."""
    if reason := why_no_mooncake():
        pytest.skip(reason)


@pytest.fixture
async def servers(mooncake: None) -> AsyncIterator[MooncakeServers]:
    async with running_mooncake() as servers:
        yield servers
