from __future__ import annotations

import pytest

from asynckv.buffers.local.writer import Declared
from asynckv.types import TensorSpec

SPECS = {name: TensorSpec((8,), "uint8") for name in ("key", "value")}
SPEC = SPECS["key"]


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("hidden", SPEC),
        ("key", TensorSpec((8,), "float32")),
        ("key", TensorSpec((7,), "uint8")),
    ],
)
def test_a_put_is_as_declared(name: str, spec: TensorSpec) -> None:
    with pytest.raises(ValueError, match=f"{name}.*declared"):
        with Declared(SPECS).putting(name, spec):
            raise LookupError


def test_a_tensor_is_put_once() -> None:
    declared = Declared(SPECS)
    with declared.putting("key", SPEC), pytest.raises(ValueError, match="before"):
        with declared.putting("key", SPEC):
            raise LookupError
    with pytest.raises(ValueError, match="before"), declared.putting("key", SPEC):
        raise LookupError


def test_a_put_that_failed_may_be_made_again() -> None:
    declared = Declared(SPECS)
    with pytest.raises(LookupError), declared.putting("key", SPEC):
        raise LookupError
    with declared.putting("key", SPEC):
        pass
    with pytest.raises(ValueError, match="not put: value"):
        declared.check_whole()


def test_what_is_still_being_put_is_missing() -> None:
    declared = Declared(SPECS)
    with declared.putting("value", SPEC):
        with declared.putting("key", SPEC):
            pass
        with pytest.raises(ValueError, match=r"1 declared .* not put: value;.*await"):
            declared.check_whole()
    declared.check_whole()
