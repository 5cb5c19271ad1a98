"""What real GPUs punish, and what goes another way than expected, fails a test."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import torch

from asynckv.devices.cuda import DeviceMemory, Event
from asynckv.testing.expectations import is_same, noise
from asynckv.testing.lookup_checks.values import MIB
from asynckv.transports.nccl.worker import DeviceWorker, _Flight
from harness.fake_devices import (
    FakeDevice,
    fake_device,
    fake_device_of,
    faultless_gpus,
)
from harness.fake_gpus import FakeGpus
from harness.gpu_pipe_pairs import expect_by_host, open_nccl_pipes, open_pipes_on
from harness.gpu_puts import PutPair, check_is_in, insert, open_put_pair
from harness.held_copies import bytes_of_tensor, held_copies, is_busy
from harness.nccl_pairs import open_nccl_pair
from harness.nccl_schedules import Outcome, run_schedule

QUICK = 12
BATCH = 500
BATCHES = 20
NBYTES = 4096


def test_what_hardware_would_punish_fails_the_test() -> None:
    with (
        pytest.raises(AssertionError, match="while a copy was under way"),
        fake_device(max_delay=4) as gpu,
    ):
        cuda = gpu.process.cuda
        stream, pinned, memory = cuda.stream(), cuda.host_alloc(8), cuda.malloc(8)
        cuda.copy(memory.address, pinned.address, 8, stream)
        allocation, _ = gpu.process.space.find(memory.address, memory.nbytes)
        while not allocation.users:
            gpu.process.gpus.progress()
        cuda.drop(memory)


async def test_a_pair_tells_of_what_real_gpus_punish() -> None:
    with pytest.raises(AssertionError, match="a fault of the test"):
        async with open_nccl_pair(lambda _: None, lambda _: None) as (near, _):
            near.inner._worker.cuda._gpus.note("a fault of the test")  # type: ignore[attr-defined]


async def test_a_pipe_that_goes_another_way_than_expected_is_told(
    two_gpus: FakeGpus,
) -> None:
    gpus = [fake_device_of(two_gpus.process(), number) for number in (0, 1)]
    with pytest.raises(AssertionError, match="nccl"):
        async with open_pipes_on(gpus[0], gpus[1], expected="cuda_ipc"):
            raise AssertionError


async def test_what_does_not_come_by_host_is_told(two_gpus: FakeGpus) -> None:
    async with open_nccl_pipes(two_gpus) as pair:
        with pytest.raises(AssertionError, match="it came by .*nccl"):
            await expect_by_host(pair)


async def insert_other_hidden(pair: PutPair) -> None:
    await pair.peer.lookup.insert([1], None, noise(MIB, 1), None, noise(8, 5))


async def insert_other_key(pair: PutPair) -> None:
    await insert(pair, 5)


@pytest.mark.parametrize("put", [insert_other_hidden, insert_other_key])
async def test_another_entry_is_not_the_one_that_was_put(
    put: Callable[[PutPair], Awaitable[None]],
) -> None:
    with faultless_gpus(2) as gpus:
        async with open_put_pair(gpus, "nccl") as pair:
            await put(pair)
            with pytest.raises(AssertionError, match="another"):
                await check_is_in(pair)


def copy(gpu: FakeDevice, target: torch.Tensor, source: DeviceMemory) -> Event:
    """Begin to copy, and return what fires when that has ended."""
    cuda, place = gpu.process.cuda, gpu.tensors.memory_of(target)
    stream, event = cuda.stream(), cuda.event()
    cuda.copy(place.address, source.address, source.nbytes, stream)
    event.record(stream)
    event.query()
    return event


@pytest.mark.parametrize("have_begun", [False, True])
def test_a_held_copy_has_begun_or_not_and_not_ended(
    gpu: FakeDevice, have_begun: bool
) -> None:
    target, source = gpu.tensor(noise(NBYTES, 1)), gpu.tensor(noise(NBYTES, 2))
    memory = gpu.tensors.memory_of(source)
    with held_copies(gpu.process, have_begun=have_begun) as gate:
        copied = copy(gpu, target, memory)
        assert not copied.query() and is_busy(gpu.process)
        held = target.as_subclass(torch.Tensor).clone()
        assert is_same(held, noise(NBYTES, 1 + have_begun))
        gate.open()
        assert copied.query() and not is_busy(gpu.process)
    assert is_same(target, noise(NBYTES, 2))


@pytest.mark.parametrize(
    ("start", "nbytes", "is_held"),
    [(0, 128, False), (128, 64, False), (128, 128, True), (NBYTES - 65, 65, True)],
)
def test_copies_of_some_bytes_of_a_tensor_are_held(
    gpu: FakeDevice, start: int, nbytes: int, is_held: bool
) -> None:
    source, target = gpu.tensor(noise(NBYTES, 2)), gpu.tensor(noise(NBYTES, 1))
    piece = gpu.tensors.memory_of(source).part(start, start + nbytes)
    with held_copies(gpu.process, bytes_of_tensor(gpu, source, 128)):
        copied = copy(gpu, target, piece)
        assert copied.query() != is_held
    assert copied.query()


async def run_all(seeds: range) -> Outcome:
    total = Outcome()
    for seed in seeds:
        try:
            found = await run_schedule(seed)
        except BaseException as exc:
            exc.add_note(f"seed {seed}")
            raise
        total.moved += found.moved
        total.failed += found.failed
        total.stopped += found.stopped
        total.given_up += found.given_up
    return total


async def test_no_schedule_is_stuck_and_no_memory_is_touched_too_late() -> None:
    total = await run_all(range(QUICK))
    assert total.moved and total.failed and total.stopped


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("batch", range(BATCHES))
async def test_none_of_ten_thousand_schedules_is_stuck(batch: int) -> None:
    total = await run_all(range(1000 + batch * BATCH, 1000 + (batch + 1) * BATCH))
    assert total.moved and total.failed and total.stopped and total.given_up


async def test_memory_that_is_let_go_too_early_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check can fail: who does not wait for the events of an abort is caught."""
    waits = DeviceWorker._has_fired

    def does_not_wait(self: DeviceWorker, flight: _Flight) -> bool:
        return flight.pipe.error is not None or waits(self, flight)

    monkeypatch.setattr(DeviceWorker, "_has_fired", does_not_wait)
    with pytest.raises(AssertionError, match="^memory was freed while a copy was"):
        await run_all(range(60))
