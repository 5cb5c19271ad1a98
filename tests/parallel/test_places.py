from __future__ import annotations

import pytest

from asynckv.parallel.copies import (
    Step,
    places_of,
    region_block_nbytes,
    region_count,
)
from asynckv.parallel.shapes import EngineShape, KVLayout


def _shape(layout: KVLayout) -> EngineShape:
    return EngineShape(
        layout=layout,
        block_size=16,
        key_nbytes=3,
        value_nbytes=0 if layout.is_mla else 2,
        num_kv_heads=1 if layout.is_mla else 4,
    )


@pytest.mark.parametrize(
    ("layout", "blocks"),
    [
        (KVLayout.kv_first("HND"), (192, 128) * 3),
        (KVLayout("KLBNH"), (192,) * 3 + (128,) * 3),
        (KVLayout.blocks_first("NHD"), (320,) * 3),
        (KVLayout.fused("NHD"), (320,) * 3),
        (KVLayout.pallas(8), (1024,) * 3),
        (KVLayout.named("LHBNC"), (80,) * 12),
        (KVLayout.named("BLHNC"), (960,)),
        (KVLayout.mla(), (48,) * 3),
    ],
)
def test_regions_are_what_stands_before_blocks(
    layout: KVLayout, blocks: tuple[int, ...]
) -> None:
    assert region_block_nbytes(_shape(layout), 3) == blocks
    assert region_count(_shape(layout), 3) == len(blocks)


def test_keys_and_values_have_strides_of_their_own() -> None:
    keys, values = places_of(_shape(KVLayout.blocks_first("HND")), 2)
    assert (keys.region, keys.offset, keys.nbytes) == (0, 0, 3)
    assert (values.region, values.offset, values.nbytes) == (0, 192, 2)
    assert keys.steps == {"L": Step(1, 0), "H": Step(0, 48), "N": Step(0, 3)}
    assert values.steps == {"L": Step(1, 0), "H": Step(0, 32), "N": Step(0, 2)}


def test_keys_and_values_apart_are_a_region_each() -> None:
    keys, values = places_of(_shape(KVLayout.kv_first()), 2)
    assert (keys.region, keys.offset, keys.block_nbytes) == (0, 0, 192)
    assert (values.region, values.offset, values.block_nbytes) == (1, 0, 128)
    assert keys.steps["L"] == values.steps["L"] == Step(2, 0)
