from __future__ import annotations

from asynckv.testing.expectations import noise
from asynckv.testing.pipe_checks import LARGE
from harness.fake_gpus import FakeGpus
from harness.ipc_pipe_pairs import open_ipc_pipes


async def test_both_sides_read_each_others_memory_of_one_gpu(
    two_gpus: FakeGpus,
) -> None:
    async with open_ipc_pipes(two_gpus) as pair:
        assert pair.ours.device.name == pair.theirs.device.name == "cuda:0"
        assert pair.near_sharing.is_open and pair.far_sharing.is_open
        assert pair.near.transport == pair.far.transport == "cuda_ipc"
        assert pair.opened == 2
    assert not pair.opened


async def test_what_is_shown_is_counted_and_what_is_kept_is_seen(
    two_gpus: FakeGpus,
) -> None:
    async with open_ipc_pipes(two_gpus) as pair:
        await pair.near.send_tensor(noise(LARGE, 1))
        await pair.near.flush()
        assert pair.moved == 1 and pair.used_bytes == LARGE
