from __future__ import annotations

import pytest

from harness.cancellations.connectors.caches import ToyCaches
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import toy_shape

MODEL = ToyModel(layers=2)


def test_a_wrong_byte_is_seen() -> None:
    caches = ToyCaches(MODEL, toy_shape(MODEL), 0, 0)
    caches.compute()
    caches.expect_computed()
    caches.layers[MODEL.layer_names[1]][1, caches.block_ids[2], 3, 1, 7] += 1
    with pytest.raises(AssertionError, match=r"layers\.1\.attn is wrong"):
        caches.expect_computed()


def test_a_late_write_is_seen() -> None:
    caches = ToyCaches(MODEL, toy_shape(MODEL), 0, 1)
    caches.expect_spoilt()
    caches.layers[MODEL.layer_names[0]][0, 7, 15, 3, 0] = 0
    with pytest.raises(AssertionError, match=r"layers\.0\.attn was written to"):
        caches.expect_spoilt()


def test_two_places_have_the_same_prompt_in_other_blocks() -> None:
    one, other = (ToyCaches(MODEL, toy_shape(MODEL), 0, place) for place in (0, 1))
    assert one.tokens == other.tokens and len(one.tokens) == 48
    assert one.block_ids != other.block_ids
