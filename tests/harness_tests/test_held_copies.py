from __future__ import annotations

import pytest
import torch

from asynckv.devices.cuda import DeviceMemory, Event
from asynckv.testing.expectations import is_same, noise
from harness.fake_devices import FakeDevice
from harness.held_copies import bytes_of_tensor, held_copies, is_busy

NBYTES = 4096


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


def test_leaving_lets_go_of_what_was_held_and_holds_no_more(gpu: FakeDevice) -> None:
    target = gpu.tensor(noise(NBYTES, 1))
    memory = gpu.tensors.memory_of(gpu.tensor(noise(NBYTES, 2)))
    with held_copies(gpu.process):
        copied = copy(gpu, target, memory)
    assert copied.query()
    assert copy(gpu, target, memory).query()


@pytest.mark.parametrize(
    ("start", "nbytes", "is_held"),
    [(0, 128, False), (128, 64, False), (128, 128, True), (NBYTES - 65, 65, True)],
)
def test_copies_of_some_bytes_of_a_tensor_are_held(
    gpu: FakeDevice, start: int, nbytes: int, is_held: bool
) -> None:
    source, target = gpu.tensor(noise(NBYTES, 2)), gpu.tensor(noise(NBYTES, 1))
    memory = gpu.tensors.memory_of(source)
    piece = memory.part(start, start + nbytes)
    with held_copies(gpu.process, bytes_of_tensor(gpu, source, 128)):
        assert copy(gpu, target, piece).query() != is_held
