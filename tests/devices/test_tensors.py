from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from asynckv.devices import names as devices
from asynckv.devices.cuda import DeviceMemory
from asynckv.devices.names import Device, device_named
from asynckv.devices.tensors import (
    Gpus,
    TorchEvent,
    TorchTensors,
    at_once,
    caught,
    gpu_of,
    index_rows,
    open_gpus,
)
from asynckv.errors import ConfigError, GPUUnavailable
from asynckv.types import TensorSpec
from harness.cupy_double import CupyDouble
from harness.fake_gpus import FakeGpus
from harness.fake_gpus.streams import FakeTorchEvent
from harness.fake_gpus.tensors import FakeTensors


def test_the_cpu_is_no_gpu() -> None:
    assert device_named(None) is device_named("cpu") is None
    assert device_named(torch.device("cpu")) is None


def test_a_name_without_a_number_is_the_gpu_of_the_rank() -> None:
    found = device_named("cuda", local_rank=3)
    assert found is not None and found.name == "cuda:3"


def test_a_rank_that_nobody_names_is_the_environments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert device_named("cuda") == Device(0)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert device_named("cuda") == Device(2)
    assert device_named("cuda:1") == Device(1)


@pytest.mark.parametrize("rank", ["first", "-1", True, 1.5])
def test_what_is_no_rank_is_refused(rank: object) -> None:
    with pytest.raises(ConfigError, match="local_rank"):
        device_named("cuda", local_rank=rank)


def test_a_number_counts_whatever_the_rank_is() -> None:
    for name in ("cuda:1", torch.device("cuda", 1), Device(1)):
        found = device_named(name, local_rank=3)
        assert found is not None and found.index == 1


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "cuda:", "cuda:-1", "mps", ""])
def test_what_is_no_device_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown"):
        device_named(name)


@pytest.fixture
def openings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Gpus]]:
    """Yield what was opened as GPUs of this process: each time another object."""
    gpus, opened, others_come = FakeGpus(), list[Gpus](), threading.Event()

    def open_slowly() -> Gpus:
        others_come.wait(0.05)
        process = gpus.process()
        opened.append(Gpus(process.cuda, FakeTensors(process)))
        return opened[-1]

    monkeypatch.setattr(devices, "open_gpus", open_slowly)
    devices._opened_once.cache_clear()
    yield opened
    devices._opened_once.cache_clear()
    gpus.close()


def test_those_who_open_a_gpu_together_open_the_same(
    openings: list[Gpus],
) -> None:
    with ThreadPoolExecutor(4) as threads:
        opened = list(threads.map(lambda _: Device(0).opened().cuda, range(4)))
    assert len(set(opened)) == len(openings) == 1


@pytest.mark.usefixtures("openings")
def test_a_number_above_what_the_process_sees_is_named() -> None:
    with pytest.raises(GPUUnavailable, match="no cuda:9"):
        Device(9).opened()


def tensors_of_torch() -> TorchTensors:
    return TorchTensors()


def test_a_tensor_of_the_host_is_on_no_gpu() -> None:
    tensor = torch.zeros(4)
    assert gpu_of(tensor) is None
    with pytest.raises(ValueError, match="on no GPU"):
        tensors_of_torch().memory_of(tensor)


def test_a_tensor_does_not_fit_over_less_memory_than_it_has() -> None:
    with pytest.raises(ValueError, match="15 bytes cannot hold 16"):
        tensors_of_torch().tensor_over(
            DeviceMemory(4096, 15, 0), TensorSpec((4,), "float32")
        )


def test_without_cupy_no_gpus_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(GPUUnavailable):
        open_gpus()


def test_the_gpus_are_cupys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", CupyDouble())
    assert isinstance(open_gpus().tensors, TorchTensors)


def test_an_event_of_torchs_is_not_recorded_elsewhere_as_if_it_were() -> None:
    nothing: Any = object()
    event = TorchEvent(nothing, nothing)
    with pytest.raises(TypeError, match="by torch"):
        event.record(nothing)


class Relaxing:
    """A driver, and a mark of torch's that notes whether this thread was relaxed."""

    def __init__(self) -> None:
        self.is_relaxed = False
        self.calls: list[bool] = []

    @contextlib.contextmanager
    def capture_relaxed(self) -> Iterator[None]:
        self.is_relaxed = True
        yield
        self.is_relaxed = False

    def query(self) -> bool:
        self.calls.append(self.is_relaxed)
        return True

    synchronize = query


@pytest.mark.parametrize("look", [TorchEvent.query, TorchEvent.synchronize])
def test_who_looks_at_an_event_of_torchs_breaks_no_capture(
    look: Callable[[TorchEvent], object],
) -> None:
    double: Any = Relaxing()
    look(TorchEvent(double, double))
    assert double.calls == [True] and not double.is_relaxed


LAYOUTS = {
    "blocks of layers": lambda pool: pool[0],
    "keys beside values": lambda pool: pool.permute(1, 0, 2)[:, 1],
    "blocks outermost": lambda pool: pool.permute(1, 0, 2).contiguous()[:, 0],
    "some columns": lambda pool: pool[1][:, 3:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("row", [8, 12, 14, 35, 64])
def test_rows_are_gathered_and_scattered_byte_for_byte(layout: str, row: int) -> None:
    pool = torch.randint(0, 256, (2, 9, row), dtype=torch.uint8)
    table, ids = LAYOUTS[layout](pool), torch.tensor([7, 0, 3, 8])
    expected, width = table[ids].clone(), table.shape[1]
    packed = torch.zeros(4 * width + 1, dtype=torch.uint8)
    for begin in (0, 1):  # where wider elements have room, and where they have not
        found = packed[begin : begin + 4 * width]
        index_rows(table, ids, found, is_gathered=True)
        assert torch.equal(found.view(4, width), expected)
        landing, others = LAYOUTS[layout](pool.clone()), [1, 2, 4, 5, 6]
        index_rows(landing, ids.flip(0), found, is_gathered=False)
        assert torch.equal(landing[ids.flip(0)], expected)
        assert torch.equal(landing[others], table[others])


def test_a_tensor_of_the_host_is_not_caught(tensors: FakeTensors) -> None:
    assert caught(torch.zeros(4), tensors) is None


def test_what_is_caught_has_the_tensors_shape_and_bytes(tensors: FakeTensors) -> None:
    found = caught(tensors.on_gpu(torch.zeros(2, 3)), tensors)
    assert found is not None and found.spec == TensorSpec((2, 3), "float32")
    assert (found.nbytes, found.dtype) == (24, torch.float32)


def test_what_is_not_its_elements_in_order_is_refused(tensors: FakeTensors) -> None:
    with pytest.raises(ValueError, match="in order"):
        caught(tensors.on_gpu(torch.zeros(2, 3)).T, tensors)


def test_what_is_ready_waits_for_no_stream(tensors: FakeTensors) -> None:
    found = at_once(tensors.on_gpu(torch.zeros(2, 3)), tensors)
    assert found.memory.ready is None and found.nbytes == 24


def test_what_is_ready_keeps_no_mark(
    tensors: FakeTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, close = list[FakeTorchEvent](), FakeTorchEvent.close

    def note(mark: FakeTorchEvent) -> None:
        closed.append(mark)
        close(mark)

    monkeypatch.setattr(FakeTorchEvent, "close", note)
    at_once(tensors.on_gpu(torch.zeros(2, 3)), tensors)
    assert len(closed) == 1


def test_a_part_of_a_tensor_is_some_of_its_bytes(tensors: FakeTensors) -> None:
    found = caught(tensors.on_gpu(torch.arange(6).reshape(2, 3)), tensors)
    assert found is not None
    part = found.part(8, 24)
    assert part.spec == TensorSpec((16,), "uint8")
    assert part.memory.address == found.memory.address + 8
    assert part.tensor.cpu().view(torch.int64).tolist() == [1, 2]
    with pytest.raises(ValueError, match="48 bytes"):
        found.part(8, 49)
