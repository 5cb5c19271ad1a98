from __future__ import annotations

import pytest
import torch

from asynckv.connectors.engine import KVEngine
from asynckv.connectors.store.lookup import StoredShape, namespace_of
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import toy_shape

MODEL = ToyModel()


def engine(tp_size: int = 1, block_size: int = 16, heads: int = 4) -> KVEngine:
    shape = toy_shape(ToyModel(heads=heads), tp_size=tp_size, block_size=block_size)
    return KVEngine(engine_id="E", block_size=block_size, tp_size=tp_size, shape=shape)


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (engine(), ""),
        (engine(2), "tp_size=2 there and 1 here"),
        (engine(2, 32), "tp_size=2 there and 1 here, block_size=32 there and 16 here"),
        (engine(heads=8), "heads, layers or layout are others"),
    ],
)
def test_it_is_said_in_what_engines_differ(other: KVEngine, difference: str) -> None:
    stored = StoredShape.read(StoredShape.of(other).tensor())
    assert stored is not None and stored.differs_from(engine()) == difference
    assert (namespace_of(other) == namespace_of(engine())) == (not difference)


@pytest.mark.parametrize(
    "value",
    [
        None,
        torch.zeros(4),
        torch.zeros(4, dtype=torch.uint8),
        torch.zeros(2**17, dtype=torch.uint8),
    ],
)
def test_what_says_nothing_is_nothing(value: torch.Tensor | None) -> None:
    assert StoredShape.read(value) is None
