from __future__ import annotations

import pytest

from asynckv.errors import GPUFailed
from asynckv.tensors.cuda import PinnedMemory
from asynckv.transports.nccl.slots import SlotPool
from harness.fake_gpus import FakeGpus
from harness.fake_gpus.cuda import FakeCuda


class Scarce(FakeCuda):
    """Has pinned memory for one slot."""

    had_some = False

    def host_alloc(self, nbytes: int) -> PinnedMemory:
        if self.had_some:
            raise GPUFailed("no pinned memory", code=2)
        self.had_some = True
        return super().host_alloc(nbytes)


def test_a_slot_is_taken_once_until_it_is_given_back() -> None:
    pool = SlotPool(1, 64)
    pool.allocate(FakeGpus().process().cuda)
    slot = pool.take()
    assert slot is not None and slot.device.nbytes == slot.pinned.nbytes == 64
    assert pool.take() is None
    pool.give(slot)
    assert pool.take() is slot


def test_all_of_it_is_freed() -> None:
    process = FakeGpus().process()
    pool = SlotPool(3, 64)
    pool.allocate(process.cuda)
    assert pool.free_count == 3
    pool.free(process.cuda)
    assert process.space.allocations() == []


def test_what_was_allocated_is_freed_when_there_is_not_enough() -> None:
    process = FakeGpus().process()
    with pytest.raises(GPUFailed, match="no pinned"):
        SlotPool(2, 64).allocate(Scarce(process))
    assert process.space.allocations() == []
