from __future__ import annotations

import msgspec
import pytest

from asynckv.parallel.shapes import CROSS_LAYER_LAYOUTS, KVLayout


@pytest.mark.parametrize(
    ("layout", "is_blocks_first", "is_split"),
    [
        (KVLayout.kv_first("NHD"), False, True),
        (KVLayout.kv_first("HND"), False, True),
        (KVLayout.blocks_first("NHD"), True, False),
        (KVLayout.blocks_first("HND"), True, False),
        (KVLayout.fused(), False, False),
        (KVLayout.pallas(256), False, False),
        (KVLayout.mla(), False, False),
    ],
)
def test_the_originals_flags_follow_from_the_axes(
    layout: KVLayout, is_blocks_first: bool, is_split: bool
) -> None:
    assert layout.is_kv_layout_blocks_first == is_blocks_first
    assert layout.split_k_and_v == is_split


@pytest.mark.parametrize(
    "axes", ["", "LKBN", "LKBNHH", "LKNBH", "KBNH", "LNB", "lkbnh"]
)
def test_what_is_no_order_of_the_axes_is_refused(axes: str) -> None:
    with pytest.raises(ValueError, match=repr(axes)):
        KVLayout(axes)


def test_other_mistakes_are_refused_too() -> None:
    for nbytes in (0, -1, 2**20):
        with pytest.raises(ValueError, match="row_align_nbytes"):
            KVLayout.pallas(nbytes)
    with pytest.raises(ValueError, match="'DHN' is neither"):
        KVLayout.fused("DHN")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'LKBNC' is none of LBHNC"):
        KVLayout.named("LKBNC")


@pytest.mark.parametrize("name", CROSS_LAYER_LAYOUTS)
def test_vllms_names_are_layouts_with_key_and_value_side_by_side(name: str) -> None:
    layout = KVLayout.named(name)
    assert layout.axes == name.replace("C", "K")
    assert layout.is_across_layers == name.startswith("B")
    assert not layout.is_mla


def test_rows_are_padded() -> None:
    assert KVLayout.pallas(256).row_nbytes(128) == 256
    assert KVLayout.pallas(256).row_nbytes(257) == 512
    assert KVLayout.fused().row_nbytes(3) == 3


def test_a_peer_can_say_its_layout_and_no_nonsense() -> None:
    layout = KVLayout.pallas(256)
    assert (
        msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=KVLayout) == layout
    )
    with pytest.raises(msgspec.ValidationError, match="orders neither"):
        msgspec.convert({"axes": "LL"}, KVLayout)
