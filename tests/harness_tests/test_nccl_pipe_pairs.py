from __future__ import annotations

from asynckv.testing.expectations import noise
from asynckv.testing.pipe_checks import LARGE
from harness.fake_gpus import FakeGpus
from harness.nccl_pipe_pairs import open_nccl_pipes


async def test_both_sides_are_on_gpus_of_their_own(two_gpus: FakeGpus) -> None:
    async with open_nccl_pipes(two_gpus) as pair:
        assert {pair.ours.device.name, pair.theirs.device.name} == {"cuda:0", "cuda:1"}
        assert pair.near.transport == pair.far.transport == "nccl"
        assert pair.near_way.is_open and pair.far_way.is_open


async def test_what_moves_is_counted_and_what_is_kept_is_seen(
    two_gpus: FakeGpus,
) -> None:
    async with open_nccl_pipes(two_gpus) as pair:
        await pair.near.send_tensor(pair.ours.tensor(noise(LARGE, 1)))
        await pair.near.flush()
        assert pair.moved == 1 and pair.used_bytes == LARGE
