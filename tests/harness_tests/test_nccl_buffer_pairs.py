from __future__ import annotations

from harness.fake_gpus import FakeGpus
from harness.nccl_buffer_pairs import open_nccl_buffers


async def test_both_ends_are_on_gpus_of_their_own() -> None:
    gpus = FakeGpus(2)
    async with open_nccl_buffers(gpus) as pair:
        assert pair.buffer.is_on_gpu and pair.peer.on_gpu is not None
        assert {pair.ours.device.name, pair.theirs.device.name} == {"cuda:0", "cuda:1"}
        assert pair.peer.transport == "nccl"
    gpus.close()
    assert not gpus.faults
