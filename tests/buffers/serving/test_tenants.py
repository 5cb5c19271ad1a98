"""Whose tenant a peer is, by its certificate; what that keeps apart is for stores."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
import torch

import asynckv
from asynckv.abc import KVStoreBuffer
from asynckv.buffers.store import StoreBuffer
from asynckv.errors import ConfigError
from asynckv.testing.certificates import Authority

MIB = 2**20
TENANTS = {"acme": "Engine-A", "umbrella": "engine-b"}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@contextlib.asynccontextmanager
async def served(authority: Authority) -> AsyncIterator[str]:
    tls = authority.issue()
    async with (
        StoreBuffer(MIB) as store,
        asynckv.serve(
            "tls://127.0.0.1:0", store=store, tls=tls, tenants=TENANTS
        ) as server,
    ):
        yield server.url


@contextlib.asynccontextmanager
async def store_of(
    authority: Authority, url: str, name: str
) -> AsyncIterator[KVStoreBuffer]:
    async with asynckv.connect(url, tls=authority.issue(name)) as peer:
        yield peer.store


async def test_who_is_no_tenant_is_named_in_the_log(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(authority) as url:
        async with store_of(authority, url, "engine-a") as mine:
            assert await mine.get("a") is None
        assert "engine-a" not in caplog.text
        async with store_of(authority, url, "engine-c") as nobody_s:
            assert await nobody_s.get("a") is None
        assert "certificate of engine-c" in caplog.text


async def test_a_tenant_s_name_may_be_any_of_a_certificate(
    authority: Authority,
) -> None:
    async with served(authority) as url:
        async with asynckv.connect(
            url, tls=authority.issue("host-7", "engine-a")
        ) as several:
            await several.store.put("a", torch.zeros(1))
        async with store_of(authority, url, "engine-c") as nobody_s:
            assert await nobody_s.get("a") is None
        async with store_of(authority, url, "engine-a") as mine:
            assert await mine.contains(["a"]) == (True,)


@pytest.mark.parametrize(
    ("tenants", "why"),
    [
        ({"acme": "x", "umbrella": "X"}, "one certificate is that of two tenants"),
        ({"": "x"}, "no name of a tenant"),
        ({"a\0b": "x"}, "no name of a tenant"),
    ],
)
def test_tenants_that_cannot_be_told_apart_are_refused(
    authority: Authority, tenants: dict[str, str], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        asynckv.serve(
            "tls://127.0.0.1:0",
            store=StoreBuffer(MIB),
            tls=authority.issue(),
            tenants=tenants,
        )


def test_tenants_without_certificates_are_refused() -> None:
    with pytest.raises(ConfigError, match="told apart by certificates"):
        asynckv.serve("tcp://127.0.0.1:0", store=StoreBuffer(MIB), tenants=TENANTS)
