"""Entries in one process's memory of a GPU, read by another on the same GPU."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote import Peer, connect
from asynckv.buffers.serve import serve
from asynckv.links.fd_socket import has_fd_sockets
from asynckv.testing.blocked import until
from asynckv.testing.expectations import is_same
from asynckv.testing.fake_devices import FakeDevice, fake_device_of
from asynckv.testing.fake_gpus import FakeGpus
from asynckv.testing.lookup_checks.values import MIB, noise

pytestmark = pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles")


class Pair(NamedTuple):
    """A buffer on a GPU, and a peer of another process on the same one."""

    buffer: LookupBuffer
    peer: Peer
    ours: FakeDevice
    theirs: FakeDevice


@pytest.fixture
def gpus() -> Iterator[FakeGpus]:
    gpus = FakeGpus()
    yield gpus
    gpus.close()
    assert not gpus.faults


@asynccontextmanager
async def open_pair(gpus: FakeGpus, url: str = "tcp://127.0.0.1:0", **options: str):
    ours, theirs = fake_device_of(gpus.process()), fake_device_of(gpus.process())
    async with (
        LookupBuffer("16MiB", device=ours.device, drain_s=0) as buffer,
        serve(url, lookup=buffer) as server,
        connect(server.url, device=theirs.device, max_bytes="16MiB", **options) as peer,
    ):
        yield Pair(buffer, peer, ours, theirs)


@pytest.fixture
async def pair(gpus: FakeGpus) -> AsyncIterator[Pair]:
    async with open_pair(gpus) as pair:
        yield pair


async def test_an_entry_is_copied_from_one_process_to_the_other_on_the_gpu(
    pair: Pair,
) -> None:
    assert pair.peer.transport == "cuda_ipc"
    await pair.buffer.insert([1], None, pair.ours.tensor(noise(MIB)), None, None)
    entry = await pair.peer.lookup.drop_select([1])
    assert isinstance(entry.key, torch.Tensor) and entry.key.is_cuda
    assert is_same(entry.key, noise(MIB))
    await until(lambda: not pair.buffer.statistics().used_bytes)
