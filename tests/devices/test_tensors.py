from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from asynckv.devices.cuda import DeviceMemory
from asynckv.devices.tensors import (
    TorchEvent,
    TorchTensors,
    gpu_of,
    index_rows,
    open_gpus,
)
from asynckv.errors import GPUUnavailable
from asynckv.types import TensorSpec
from harness.cupy_double import CupyDouble


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
