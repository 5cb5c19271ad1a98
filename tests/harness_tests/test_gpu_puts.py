from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import pytest

from asynckv.links.fd_socket import has_fd_sockets
from asynckv.testing.lookup_checks.values import MIB, noise
from harness.fake_devices import faultless_gpus
from harness.fake_gpus import FakeGpus
from harness.gpu_puts import (
    PutPair,
    PutWay,
    check_is_in,
    insert,
    open_put_pair,
    put_layers,
)

BY_IPC = pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles")
WAYS = pytest.mark.parametrize("way", [pytest.param("cuda_ipc", marks=BY_IPC), "nccl"])


@pytest.fixture
def gpus() -> Iterator[FakeGpus]:
    with faultless_gpus(2) as gpus:
        yield gpus


@WAYS
async def test_what_is_put_goes_that_way(gpus: FakeGpus, way: PutWay) -> None:
    async with open_put_pair(gpus, way) as pair:
        await insert(pair, 2)
        await check_is_in(pair, 2)
        await put_layers(pair)
        await check_is_in(pair)
        assert pair.has_put and pair.peer.transport == way


async def insert_other_hidden(pair: PutPair) -> None:
    await pair.peer.lookup.insert([1], None, noise(MIB, 1), None, noise(8, 5))


async def insert_other_key(pair: PutPair) -> None:
    await insert(pair, 5)


@pytest.mark.parametrize("put", [insert_other_hidden, insert_other_key])
async def test_another_entry_is_not_the_one_that_was_put(
    gpus: FakeGpus, put: Callable[[PutPair], Awaitable[None]]
) -> None:
    async with open_put_pair(gpus, "nccl") as pair:
        await put(pair)
        with pytest.raises(AssertionError, match="another"):
            await check_is_in(pair)
