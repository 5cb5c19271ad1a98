from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence

import numpy
import pytest
import torch

from asynckv.devices import lanes as device_lanes
from asynckv.devices.access import gpu_access
from asynckv.devices.cuda import DeviceMemory
from asynckv.devices.lanes import (
    DeviceLane,
    DeviceLanes,
    DevicePlace,
    DeviceRows,
)
from asynckv.devices.tensors import at_once
from asynckv.errors import GPUFailed
from asynckv.tensors.runs import Memory, runs_at
from asynckv.testing.lookup_checks.values import noise
from asynckv.types import TensorSpec
from harness.fake_devices import FakeDevice, fake_device
from harness.fake_gpus.gates import Gate
from harness.fake_gpus.streams import FakeStream

SLOT = 256
ROW = 24


@pytest.fixture
def gpu() -> Iterator[FakeDevice]:
    with fake_device(max_delay=3) as gpu:
        yield gpu


def lanes_with(gpu: FakeDevice, limit_s: float = 5) -> DeviceLanes:
    return DeviceLanes(
        *(lambda: gpu.process.cuda, lambda: gpu.tensors),
        slot_nbytes=SLOT,
        table_rows=8,
        limit_s=limit_s,
    )


@pytest.fixture
def lanes(gpu: FakeDevice) -> Iterator[DeviceLanes]:
    lanes = lanes_with(gpu)
    yield lanes
    lanes.close()


def memory_with(gpu: FakeDevice, content: torch.Tensor) -> DeviceMemory:
    return at_once(gpu.tensor(content), gpu.tensors).memory


def rows_with(
    gpu: FakeDevice, content: torch.Tensor, ids: Sequence[int], columns: int = 0
) -> DeviceRows:
    """Return rows of a table; of some of its columns, if so many."""
    table, memory = gpu.tensor(content), memory_with(gpu, content)
    memory = at_once(table, gpu.tensors).memory
    columns = columns or content.shape[1]
    end = (len(content) - 1) * content.shape[1] + columns
    place = memory.part(0, end)
    return DeviceRows(table[:, :columns], numpy.array(ids, numpy.int64), place)


def read_all(lane: DeviceLane, places: Sequence[DevicePlace]) -> list[bytes]:
    found = [b""] * len(places)
    for which, piece in lane.read(places):
        found[which] += bytes(piece)
    return found


def bytes_in(gpu: FakeDevice, memory: DeviceMemory) -> bytes:
    return gpu.process.cuda.view(memory).tobytes()


@pytest.mark.parametrize("nbytes", [0, 1, SLOT - 1, SLOT, SLOT + 1, 5 * SLOT + 3])
def test_all_bytes_of_each_place_are_read_in_order(
    gpu: FakeDevice, lanes: DeviceLanes, nbytes: int
) -> None:
    contents = [noise(nbytes, 1), noise(40, 2), noise(nbytes, 3)]
    places = [memory_with(gpu, content) for content in contents]
    with lanes.lane(0) as lane:
        found = read_all(lane, places)
    assert found == [content.numpy().tobytes() for content in contents]


@pytest.mark.parametrize("nbytes", [0, 1, SLOT - 1, SLOT, SLOT + 1, 5 * SLOT + 3])
def test_what_is_written_is_there_when_it_is_exhausted(
    gpu: FakeDevice, lanes: DeviceLanes, nbytes: int
) -> None:
    contents = [noise(nbytes, 1), noise(40, 2)]
    places = [memory_with(gpu, content * 0) for content in contents]
    sources: list[Memory] = [content.numpy().data for content in contents]
    passed = [b"", b""]
    with lanes.lane(0) as lane:
        for which, piece in lane.write(places, sources):
            passed[which] += bytes(piece)
        found = read_all(lane, places)
    assert found == passed == [content.numpy().tobytes() for content in contents]


ORDERS = [[3], [7, 3, 4], [5, 1, 9, 0, 2, 8, 30, 17, 16, 11, 29], [0, 1, 2, 3]]


@pytest.mark.parametrize("row", [1, 7, ROW, SLOT, 2 * SLOT + 5])
@pytest.mark.parametrize("ids", ORDERS)
@pytest.mark.parametrize("apart", [0, 3, 8])
def test_rows_are_read_and_written_in_the_order_of_their_ids(
    gpu: FakeDevice, lanes: DeviceLanes, row: int, ids: list[int], apart: int
) -> None:
    content = noise(31 * (row + apart)).view(31, row + apart)
    rows, expected = rows_with(gpu, content, ids, row), content[ids][:, :row]
    with lanes.lane(0) as lane:
        assert read_all(lane, [rows]) == [expected.numpy().tobytes()]
        back = rows_with(gpu, content * 0, ids, row)
        for _ in lane.write([back], [expected.contiguous().numpy().reshape(-1).data]):
            pass
    landed = content * 0
    landed[torch.tensor(ids), :row] = expected
    assert torch.equal(back.table.cpu(), landed[:, :row])


def test_what_lies_in_many_places_of_the_host_is_written_too(
    gpu: FakeDevice, lanes: DeviceLanes
) -> None:
    content = noise(4 * SLOT)
    spans = [(start, start + 16) for start in range(0, 4 * SLOT, 32)]
    place = memory_with(gpu, noise(2 * SLOT) * 0)
    with lanes.lane(0) as lane:
        for _ in lane.write([place], [runs_at(content.numpy().data, spans)]):
            pass
    expected = content.view(-1, 32)[:, :16].contiguous().numpy().tobytes()
    assert bytes_in(gpu, place) == expected


@pytest.mark.parametrize("way", ["plain", "gathered", "scattered", "both"])
def test_bytes_go_from_place_to_place_of_a_gpu(
    gpu: FakeDevice, lanes: DeviceLanes, way: str
) -> None:
    content, ids = noise(31 * ROW).view(31, ROW), ORDERS[2]
    packed = content[: len(ids)] if way in ("plain", "scattered") else content[ids]
    source = memory_with(gpu, packed.contiguous())
    target = memory_with(gpu, packed * 0)
    rows, landing = rows_with(gpu, content, ids), rows_with(gpu, content * 0, ids[::-1])
    with lanes.lane(0) as lane:
        from_rows, to_rows = way in ("gathered", "both"), way in ("scattered", "both")
        ends = rows if from_rows else source, landing if to_rows else target
        for _ in lane.within(*ends):
            pass
        found = read_all(lane, [ends[1]])
    assert found == [packed.numpy().tobytes()]


def test_long_runs_are_copied_and_not_gathered(
    gpu: FakeDevice, lanes: DeviceLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_lanes, "_LONG_RUN_NBYTES", 2 * ROW)
    content, ids = noise(31 * ROW).view(31, ROW), [4, 5, 20, 21]
    with lanes.lane(0) as lane:
        found = read_all(lane, [rows_with(gpu, content, ids)])
    assert found == [content[ids].numpy().tobytes()]
    assert not gpu.process.cuda.launches


def test_a_slot_is_filled_with_rows_of_many_tables(
    gpu: FakeDevice, lanes: DeviceLanes
) -> None:
    contents = [noise(31 * 8, number).view(31, 8) for number in range(5)]
    places = [rows_with(gpu, content, [7, 2, 9]) for content in contents]
    with lanes.lane(0) as lane:
        read_all(lane, places[:1])
        before = gpu.process.cuda.launches
        found = read_all(lane, places)
    # Eight ids have room in a slot: three, three, two, then one (a copy), three, three.
    assert gpu.process.cuda.launches - before == 5
    assert found == [content[[7, 2, 9]].numpy().tobytes() for content in contents]


def test_the_next_bytes_are_on_their_way_while_some_are_read(
    gpu: FakeDevice, lanes: DeviceLanes
) -> None:
    place = memory_with(gpu, noise(3 * SLOT))
    with lanes.lane(0) as lane:
        reading = lane.read([place])
        next(reading)
        for _ in range(20):
            gpu.process.gpus.progress()
        pinned = [a for a in gpu.process.space.allocations() if a.device < 0]
        assert len([one for one in pinned if one.array.any()]) == 2
        reading.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("fails", [False, True])
def test_a_lane_that_is_given_back_has_nothing_under_way(
    gpu: FakeDevice, lanes: DeviceLanes, fails: bool
) -> None:
    place = memory_with(gpu, noise(8) * 0)

    def write() -> None:
        with lanes.lane(0) as lane:
            writing = lane.write([place, place], [noise(8).numpy().data] * 2)
            next(writing), next(writing)
            if fails:
                raise KeyError

    if fails:
        with pytest.raises(KeyError):
            write()
    else:
        write()
    assert not any(stream.work for stream in gpu.process.streams.values())


def test_a_lane_is_used_again(lanes: DeviceLanes) -> None:
    with lanes.lane(0) as first, lanes.lane(0) as second:
        assert first is not second
    with lanes.lane(0) as again:
        assert again in (first, second)


def test_a_lane_in_use_goes_with_its_end(gpu: FakeDevice, lanes: DeviceLanes) -> None:
    place, before = memory_with(gpu, noise(8)), set(gpu.process.streams)
    with lanes.lane(0) as lane:
        read_all(lane, [place])
        lanes.close()
        assert set(gpu.process.streams) > before
    assert set(gpu.process.streams) == before


def test_what_is_closed_has_no_memory_and_no_stream(gpu: FakeDevice) -> None:
    rows, before = (
        rows_with(gpu, noise(64).view(8, 8), [3, 1]),
        set(gpu.process.streams),
    )
    count, lanes = len(gpu.process.space.allocations()), lanes_with(gpu)
    with lanes.lane(0) as lane:
        read_all(lane, [rows])
    assert len(gpu.process.space.allocations()) > count
    lanes.close()
    assert len(gpu.process.space.allocations()) == count
    assert set(gpu.process.streams) == before


def test_nothing_is_left_of_memory_for_rows_that_torch_cannot_use(
    gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(memory: DeviceMemory, spec: TensorSpec) -> None:
        raise RuntimeError("no kernel image is available for execution")

    rows = rows_with(gpu, noise(64).view(8, 8), [3, 1])
    count, lanes = len(gpu.process.owned), lanes_with(gpu)
    monkeypatch.setattr(gpu.tensors, "tensor_over", refuse)
    with pytest.raises(RuntimeError, match="no kernel"), lanes.lane(0) as lane:
        read_all(lane, [rows])
    lanes.close()
    assert len(gpu.process.owned) == count


def test_a_gpu_whose_context_is_gone_fails_no_closing(
    gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(stream: FakeStream) -> None:
        raise GPUFailed("the context is gone")

    lanes = lanes_with(gpu)
    with lanes.lane(0):
        pass
    monkeypatch.setattr(FakeStream, "close", refuse)
    lanes.close()


def test_a_copy_that_does_not_end_is_given_up_and_its_memory_kept(
    gpu: FakeDevice,
) -> None:
    lanes, gate = lanes_with(gpu, limit_s=0.05), Gate()
    place = memory_with(gpu, noise(8))
    with lanes.lane(0):
        pass
    before = set(gpu.process.space.allocations())
    with pytest.raises(GPUFailed, match="not ended"), lanes.lane(0, place) as lane:
        assert isinstance(lane._stream, FakeStream)
        lane._stream.add(gate)
        read_all(lane, [place])
    del place, lane
    gc.collect()
    with pytest.raises(GPUFailed, match="earlier"), lanes.lane(0):
        pass
    lanes.close()
    assert before <= set(gpu.process.space.allocations())
    gate.open()


def test_an_error_of_cuda_is_told_with_its_code(
    gpu: FakeDevice, lanes: DeviceLanes
) -> None:
    gate, place = Gate(), memory_with(gpu, noise(8))
    gate.fail(GPUFailed("an illegal access", code=700))
    with (
        pytest.raises(GPUFailed, match="illegal access") as caught,
        lanes.lane(0) as lane,
    ):
        assert isinstance(lane._stream, FakeStream)
        lane._stream.add(gate)
        read_all(lane, [place])
    assert caught.value.code == 700
    with lanes.lane(0) as lane:
        assert read_all(lane, [place]) == [noise(8).numpy().tobytes()]


def test_memory_for_rows_is_allocated_while_nothing_waits_for_a_peer(
    gpu: FakeDevice, lanes: DeviceLanes
) -> None:
    rows, quiet = (
        rows_with(gpu, noise(64).view(8, 8), [3, 1]),
        gpu_access(gpu.process.cuda, 0),
    )
    quiet.begin_operation()
    found: list[bytes] = []

    def read() -> None:
        with lanes.lane(0) as lane:
            found.extend(read_all(lane, [rows]))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive() and not gpu.process.cuda.launches
    quiet.end_operation()
    thread.join(5)
    assert found == [noise(64).view(8, 8)[[3, 1]].numpy().tobytes()]


def test_without_cuda_every_lane_says_so(gpu: FakeDevice) -> None:
    def refuse() -> None:
        raise GPUFailed("no driver")

    lanes = DeviceLanes(refuse, lambda: gpu.tensors)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(GPUFailed, match="no driver"), lanes.lane(0):
            pass


def test_without_pinned_memory_it_is_said_and_no_stream_is_left(
    gpu: FakeDevice, lanes: DeviceLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(nbytes: int) -> None:
        raise GPUFailed("out of memory", code=2)

    place, before = memory_with(gpu, noise(8)), set(gpu.process.streams)
    monkeypatch.setattr(gpu.process.cuda, "host_alloc", refuse)
    with pytest.raises(GPUFailed, match="out of memory"), lanes.lane(0) as lane:
        read_all(lane, [place])
    lanes.close()
    assert set(gpu.process.streams) == before
