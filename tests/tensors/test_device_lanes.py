from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from asynckv.errors import GPUFailed
from asynckv.tensors.device_lanes import DeviceLane, DeviceLanes
from harness.fake_devices import FakeDevice, fake_device
from harness.fake_gpus.gates import Gate
from harness.fake_gpus.streams import FakeStream


@pytest.fixture
def gpu() -> Iterator[FakeDevice]:
    with fake_device(max_delay=3) as gpu:
        yield gpu


@pytest.fixture
def lanes(gpu: FakeDevice) -> Iterator[DeviceLanes]:
    lanes = DeviceLanes(gpu.device.opened)
    yield lanes
    lanes.close()


def queue(lane: DeviceLane, target: int) -> None:
    slot, event = lane.slot()
    slot.view[:8] = b"12345678"
    lane.cuda.copy(target, slot.address, 8, lane.stream)
    event.record(lane.stream)


def test_a_lane_that_is_given_back_has_nothing_under_way(
    gpu: FakeDevice, lanes: DeviceLanes
) -> None:
    memory = gpu.process.cuda.malloc(8)
    with lanes.lane(0) as lane:
        queue(lane, memory.address)
    assert bytes(gpu.process.cuda.view(memory)) == b"12345678"


def test_after_an_error_too(gpu: FakeDevice, lanes: DeviceLanes) -> None:
    memory = gpu.process.cuda.malloc(8)
    with pytest.raises(KeyError), lanes.lane(0) as lane:
        queue(lane, memory.address)
        raise KeyError
    assert bytes(gpu.process.cuda.view(memory)) == b"12345678"


def test_a_lane_is_used_again(lanes: DeviceLanes) -> None:
    with lanes.lane(0) as first, lanes.lane(0) as second:
        assert first is not second
    with lanes.lane(0) as again:
        assert again in (first, second)


def test_a_slot_is_given_again_when_its_copy_has_ended(
    gpu: FakeDevice, lanes: DeviceLanes
) -> None:
    memory = gpu.process.cuda.malloc(8)
    with lanes.lane(0) as lane:
        for _ in range(3):
            queue(lane, memory.address)
        assert len({lane.slot()[0].address for _ in range(4)}) == 2


def test_a_slot_whose_copy_is_under_way_is_waited_for(
    gpu: FakeDevice, lanes: DeviceLanes
) -> None:
    memory, gate = gpu.process.cuda.malloc(8), Gate()
    with lanes.lane(0) as lane:
        assert isinstance(lane.stream, FakeStream)
        lane.stream.add(gate)
        for _ in range(2):
            queue(lane, memory.address)
        thread = threading.Thread(target=lane.slot)
        thread.start()
        thread.join(0.02)
        waits = thread.is_alive()
        gate.open()
        thread.join(5)
    assert waits and not thread.is_alive()


def test_a_lane_in_use_goes_with_its_end(gpu: FakeDevice, lanes: DeviceLanes) -> None:
    with lanes.lane(0) as lane:
        lane.slot()
        lanes.close()
        assert gpu.process.streams
    assert not gpu.process.streams


def test_what_is_closed_has_no_pinned_memory_and_no_stream(gpu: FakeDevice) -> None:
    process, lanes = gpu.process, DeviceLanes(gpu.device.opened)
    before = set(process.streams)
    memory = process.cuda.malloc(8)
    with lanes.lane(0) as lane:
        for _ in range(3):
            queue(lane, memory.address)
    pinned = [one for one in process.space.allocations() if one.device < 0]
    assert len(pinned) == 2
    lanes.close()
    assert all(one.is_gone for one in pinned) and set(process.streams) == before


def test_a_gpu_whose_context_is_gone_fails_no_closing(
    gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(stream: FakeStream) -> None:
        raise GPUFailed("the context is gone")

    lanes = DeviceLanes(gpu.device.opened)
    with lanes.lane(0):
        pass
    monkeypatch.setattr(FakeStream, "close", refuse)
    lanes.close()
