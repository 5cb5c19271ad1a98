"""Values in one process's memory of a GPU, put and got by a peer."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import torch

from asynckv.buffers.remote import connect
from asynckv.errors import ChecksumError, GPUFailed
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.tensors.cuda import DeviceMemory
from asynckv.testing.blocked import until
from asynckv.testing.expectations import is_same
from asynckv.testing.fake_gpus import FakeGpus
from asynckv.testing.gpu_stores import GpuStores, open_gpu_stores
from asynckv.testing.lookup_checks.values import MIB, noise
from asynckv.testing.store_checks.values import StoreCheck
from asynckv.testing.store_conformance import STORE_CHECKS

pytestmark = pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles")

WAYS = {
    "cuda_ipc": {},
    "nccl": {"theirs": 1},
    "inline": {"url": "?payload=inline"},
    "host": {"device": None},
}


@pytest.fixture
async def pair(gpus: FakeGpus) -> AsyncIterator[GpuStores]:
    async with open_gpu_stores(gpus) as pair:
        yield pair


@pytest.fixture
async def apart(two_gpus: FakeGpus) -> AsyncIterator[GpuStores]:
    async with open_gpu_stores(two_gpus, theirs=1) as pair:
        yield pair


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
async def test_a_served_store_on_a_gpu_keeps_what_every_one_keeps(
    two_gpus: FakeGpus, check: StoreCheck, way: str
) -> None:
    async with open_gpu_stores(two_gpus, **WAYS[way]) as pair:
        await check(pair.peer.store, pair.store)


async def test_a_value_is_copied_from_one_process_to_the_other_on_the_gpu(
    pair: GpuStores,
) -> None:
    assert pair.peer.transport == "cuda_ipc"
    await pair.store.put("key", pair.ours.tensor(noise(MIB)))
    value = await pair.peer.store.get("key")
    assert value is not None and value.is_cuda and is_same(value, noise(MIB))
    assert not pair.peer.budget.used_bytes
