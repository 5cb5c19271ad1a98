from __future__ import annotations

import pytest
import torch

from asynckv.buffers.local.writer import Declared
from asynckv.types import TensorSpec

SPECS = {name: TensorSpec((8,), "uint8") for name in ("key", "value")}
NOISE = torch.arange(8, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("hidden", NOISE), ("key", torch.zeros(8)), ("key", NOISE[:7])],
)
def test_a_put_is_as_declared(name: str, tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=f"{name}.*declared"):
        with Declared(SPECS).putting(name, tensor):
            raise LookupError


def test_a_tensor_is_put_once() -> None:
    declared = Declared(SPECS)
    with declared.putting("key", NOISE), pytest.raises(ValueError, match="before"):
        with declared.putting("key", NOISE):
            raise LookupError
    with pytest.raises(ValueError, match="before"), declared.putting("key", NOISE):
        raise LookupError


def test_a_put_that_failed_may_be_made_again() -> None:
    declared = Declared(SPECS)
    with pytest.raises(LookupError), declared.putting("key", NOISE):
        raise LookupError
    with declared.putting("key", NOISE):
        pass
    with pytest.raises(ValueError, match="not put: value"):
        declared.check_whole()


def test_what_is_still_being_put_is_missing() -> None:
    declared = Declared(SPECS)
    with declared.putting("value", NOISE):
        with declared.putting("key", NOISE):
            pass
        with pytest.raises(ValueError, match=r"1 declared .* not put: value;.*await"):
            declared.check_whole()
    declared.check_whole()
