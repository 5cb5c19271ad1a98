from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from asynckv.testing.expectations import is_same
from asynckv.testing.fake_gpus import FakeGpus
from asynckv.testing.gpu_stores import GpuStores, open_gpu_stores
from asynckv.testing.lookup_checks.values import MIB, noise


@pytest.fixture
async def apart(two_gpus: FakeGpus) -> AsyncIterator[GpuStores]:
    async with open_gpu_stores(two_gpus, theirs=1, digest="full") as pair:
        yield pair


async def test_a_value_without_a_digest_is_digested_for_its_peer(
    apart: GpuStores,
) -> None:
    await apart.store.put("key", noise(MIB))
    pinned = apart.store.lookup("key", None)
    assert pinned is not None
    pinned._value.digest = b""
    assert is_same(await apart.peer.store.get("key"), noise(MIB))
    apart.store.release(pinned)
    assert apart.has_moved
