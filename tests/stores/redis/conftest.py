"""A real Redis server for each test, which it may do anything to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from asynckv.security.tls import TLS
from asynckv.testing.certificates import Authority
from harness.redis_servers import RedisProcess, running_redis, tls_options


@pytest.fixture
async def server(tmp_path: Path, redis_program: None) -> AsyncIterator[RedisProcess]:
    async with running_redis(tmp_path) as server:
        yield server


@pytest.fixture
def tls(tmp_path: Path) -> TLS:
    return Authority(tmp_path).issue()


@pytest.fixture
async def tls_url(tmp_path: Path, tls: TLS, redis_program: None) -> AsyncIterator[str]:
    """Of a server that speaks TLS alone, and wants a password."""
    options = [*tls_options(tls), "--requirepass", "s3cret"]
    async with running_redis(tmp_path, *options) as server:
        yield f"rediss://:s3cret@127.0.0.1:{server.port}/2?ssl_ca_certs={tls.ca}"
