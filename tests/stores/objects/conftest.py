"""Object tiers on a real S3 server, and in folders, that are there for one test."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from asynckv.abc import StoreTier
from harness.moto_server import MotoServer, moto, obstore_has_its_threads, s3

__all__ = (
    "KINDS",
    "OpenObjects",
    "moto",
    "obstore_has_its_threads",
    "prefix",
    "s3",
    "there_before_each_begins",
    "url",
)

KINDS = ("s3", "file")
OpenObjects: TypeAlias = Callable[[], StoreTier]

_numbers = itertools.count()


@pytest.fixture(scope="session", autouse=True)
def there_before_each_begins(moto: MotoServer | None) -> None:
    """What outlives a test is not to be left behind by one."""


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
