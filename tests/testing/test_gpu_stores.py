from __future__ import annotations

import pytest

from asynckv.testing.fake_gpus import FakeGpus
from asynckv.testing.gpu_stores import open_gpu_stores


@pytest.mark.parametrize(("theirs", "way"), [(0, "cuda_ipc"), (1, "nccl")])
async def test_the_number_of_the_peers_gpu_says_what_way_there_is(
    theirs: int, way: str
) -> None:
    gpus = FakeGpus(2)
    async with open_gpu_stores(gpus, theirs=theirs) as pair:
        assert pair.peer.transport == way
        assert not pair.has_moved and not pair.pinned_bytes
    gpus.close()
    assert not gpus.faults


async def test_a_peer_without_a_device_has_tensors_of_a_gpu_all_the_same() -> None:
    gpus = FakeGpus()
    async with open_gpu_stores(gpus, device=None) as pair:
        assert pair.peer.on_gpu is None and pair.store.is_on_gpu
    gpus.close()
