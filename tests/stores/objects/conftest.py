"""Object tiers on a real S3 server, and in folders, that are there for one test."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from asynckv.abc import StoreTier
from asynckv.stores.objects import ObjectTier
from harness.moto_server import MotoServer

KINDS = ("s3", "file")
OpenObjects: TypeAlias = Callable[[], StoreTier]

_numbers = itertools.count()


@pytest.fixture(scope="session", autouse=True)
def obstore_has_its_threads() -> None:
    """Descriptors of theirs stay until the interpreter ends."""

    async def use() -> None:
        async with ObjectTier.from_url("file:///nowhere/at/all") as tier:
            await tier.probe()

    asyncio.run(use())


@pytest.fixture(scope="session", autouse=True)
def moto() -> Iterator[MotoServer | None]:
    """A server for all tests, which leave it as it was; there before each begins."""
    if importlib.util.find_spec("moto") is None:
        yield None
        return
    server = MotoServer()
    yield server
    server.kill()


@pytest.fixture
def s3(moto: MotoServer | None, monkeypatch: pytest.MonkeyPatch) -> MotoServer:
    """The same, with credentials in the environment."""
    if moto is None:
        pytest.skip('no S3 server here: pip install "moto[s3]" flask flask-cors')
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-to-be-told")
    return moto


@pytest.fixture
def prefix() -> str:
    """Where a test has the server for itself."""
    return f"test-{next(_numbers)}"


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path, prefix: str) -> str:
    """Of an empty place: with the server where there is one, or in a folder."""
    if request.param == "file":
        return f"file://{tmp_path}/kv"
    server: MotoServer = request.getfixturevalue("s3")
    return server.url(prefix)
