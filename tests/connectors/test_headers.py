from __future__ import annotations

import pytest
import torch

from asynckv.connectors.keys import EntryHeader
from asynckv.errors import IncompatiblePeer
from asynckv.types import TensorSpec
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import toy_shape


def test_a_header_survives_being_a_tensor() -> None:
    header = EntryHeader(
        engine_id="e",
        rank=1,
        block_size=16,
        layers=("a", "b"),
        shape=toy_shape(ToyModel()),
    )
    assert EntryHeader.of(header.tensor()) == header


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, dtype=torch.uint8),
        torch.empty(0, dtype=torch.uint8),
        EntryHeader(engine_id="e", rank=0, block_size=1, layers=(), version=2).tensor(),
    ],
)
def test_what_is_no_header_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(IncompatiblePeer):
        EntryHeader.of(tensor)


@pytest.mark.parametrize(
    "spec", [None, TensorSpec((4,), "int32"), TensorSpec((2**21,), "uint8")]
)
def test_an_entry_without_a_header_is_refused_unread(spec: TensorSpec | None) -> None:
    with pytest.raises(IncompatiblePeer, match="not inserted by a connector"):
        EntryHeader.check_spec(spec)
