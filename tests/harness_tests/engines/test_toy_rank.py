from __future__ import annotations

import pytest
import torch

from asynckv.parallel.shapes import KVLayout
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import toy_shape
from harness.engines.toy_rank import ToyRank

MODEL = ToyModel()


@pytest.mark.parametrize(
    "layout",
    [
        KVLayout.kv_first(),
        KVLayout.kv_first("HND"),
        KVLayout.blocks_first(),
        KVLayout.fused("HND"),
    ],
)
def test_what_is_written_is_read_in_any_layout(layout: KVLayout) -> None:
    shape = toy_shape(MODEL, tp_size=2, block_size=4, layout=layout)
    rank, tokens = ToyRank(MODEL, shape, 1, 8), list(range(10))
    layer = MODEL.layer_names[2]
    rank.write(layer, [5, 1, 7], tokens[:6], 0)
    rank.write(layer, [5, 1, 7], tokens, 6)
    mine = torch.from_numpy(MODEL.rows(tokens, 0, 2))[:, :, 2:]
    assert torch.equal(rank.read(layer, [5, 1, 7], 10), mine)
    assert len(rank.sums([5, 1, 7], 10)) == 4 * 2
