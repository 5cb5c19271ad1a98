"""A server that speaks S3 for all tests of a process, and what obstore keeps."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator

import pytest

from asynckv.stores.objects import ObjectTier
from harness.moto_server import MotoServer

__all__ = ("moto", "obstore_has_its_threads", "s3")


@pytest.fixture(scope="session")
def obstore_has_its_threads() -> None:
    """Descriptors of theirs stay until the interpreter ends."""

    async def use() -> None:
        async with ObjectTier.from_url("file:///nowhere/at/all") as tier:
            await tier.probe()

    asyncio.run(use())


@pytest.fixture(scope="session")
def moto(obstore_has_its_threads: None) -> Iterator[MotoServer | None]:
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
