from __future__ import annotations

import pytest
import torch

from asynckv.devices.tensors import at_once, caught
from asynckv.types import TensorSpec
from harness.fake_gpus.tensors import FakeTensors


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


def test_a_part_of_a_tensor_is_some_of_its_bytes(tensors: FakeTensors) -> None:
    found = caught(tensors.on_gpu(torch.arange(6).reshape(2, 3)), tensors)
    assert found is not None
    part = found.part(8, 24)
    assert part.spec == TensorSpec((16,), "uint8")
    assert part.memory.address == found.memory.address + 8
    assert part.tensor.cpu().view(torch.int64).tolist() == [1, 2]
    with pytest.raises(ValueError, match="48 bytes"):
        found.part(8, 49)
