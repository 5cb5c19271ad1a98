from __future__ import annotations

import pytest

from asynckv.links.fd_socket import has_fd_sockets
from harness.fake_gpus import FakeGpus
from harness.gpu_pairs import open_gpu_pair

pytestmark = pytest.mark.skipif(not has_fd_sockets(), reason="no sockets for handles")


async def test_the_peer_reads_the_buffers_memory_of_the_gpu() -> None:
    gpus = FakeGpus()
    async with open_gpu_pair(gpus) as pair:
        assert pair.peer.transport == "cuda_ipc"
        assert (pair.opened, pair.pinned_bytes) == (1, 0)
    assert not pair.opened
    gpus.close()


async def test_options_are_those_of_the_peer() -> None:
    gpus = FakeGpus()
    async with open_gpu_pair(gpus, device=None) as pair:
        assert pair.peer.transport != "cuda_ipc" and not pair.opened
    gpus.close()
