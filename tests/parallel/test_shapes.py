from __future__ import annotations

import itertools

import msgspec
import pytest

from asynckv.errors import IncompatiblePeer
from asynckv.parallel.shapes import (
    CROSS_LAYER_LAYOUTS,
    EngineShape,
    KVLayout,
    Rank,
    check_same_model,
    split_layers,
)

_SHAPE = EngineShape(
    layout=KVLayout.kv_first(),
    block_size=16,
    key_nbytes=256,
    num_kv_heads=4,
    stages=(2, 3),
)

_MLA = EngineShape(layout=KVLayout.mla(), block_size=64, key_nbytes=1152, tp_size=3)


def _with_tp(tp_size: int, heads: int = 4) -> EngineShape:
    return msgspec.structs.replace(_SHAPE, tp_size=tp_size, num_kv_heads=heads)


@pytest.mark.parametrize(
    ("tp_size", "heads", "replicas"),
    [
        (1, [[0, 1, 2, 3]], 1),
        (2, [[0, 1], [2, 3]], 1),
        (4, [[0], [1], [2], [3]], 1),
        (8, [[0], [0], [1], [1], [2], [2], [3], [3]], 2),
    ],
)
def test_heads_are_divided_and_replicated_only_beyond_one_a_rank(
    tp_size: int, heads: list[list[int]], replicas: int
) -> None:
    shape = _with_tp(tp_size)
    assert [list(shape.heads_of(rank)) for rank in range(tp_size)] == heads
    assert shape.replicas == replicas
    assert shape.is_kv_replicated == (tp_size > 4)


@pytest.mark.parametrize(("tp_size", "heads"), [(3, 4), (8, 12), (6, 4), (16, 6)])
def test_heads_that_cannot_be_divided_are_refused_by_name(
    tp_size: int, heads: int
) -> None:
    with pytest.raises(ValueError, match=f"num_kv_heads={heads} .* tp_size={tp_size}"):
        _with_tp(tp_size, heads)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tp_size", 0),
        ("tp_size", 2**11),
        ("block_size", 0),
        ("num_kv_heads", -4),
        ("key_nbytes", 0),
        ("value_nbytes", 0),
        ("stages", ()),
        ("stages", (1, 0)),
        ("stages", (2**20,)),
        ("stages", (1,) * 300),
    ],
)
def test_what_cannot_be_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        msgspec.structs.replace(_SHAPE, **{field: value})


@pytest.mark.parametrize(
    ("field", "value"), [("tp_size", "2"), ("block_size", 16.0), ("key_nbytes", True)]
)
def test_what_is_no_number_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{field} is a whole number"):
        msgspec.structs.replace(_SHAPE, **{field: value})


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_one_rank_may_be_seen_as_an_engine(tp_size: int) -> None:
    shape = _with_tp(tp_size)
    alone = shape.of_one_rank(3)
    assert (alone.tp_size, alone.stages) == (1, (3,))
    assert alone.heads_per_rank == shape.heads_per_rank
    assert _MLA.of_one_rank(1) == msgspec.structs.replace(_MLA, tp_size=1)


def test_a_latent_is_whole_on_every_rank() -> None:
    assert [list(_MLA.heads_of(rank)) for rank in range(3)] == [[0], [0], [0]]
    assert (_MLA.is_mla, _MLA.replicas, _MLA.part_nbytes) == (True, 3, (1152,))
    for wrong in ({"num_kv_heads": 3}, {"value_nbytes": 4}):
        with pytest.raises(ValueError, match="MLA has one head"):
            msgspec.structs.replace(_MLA, **wrong)


def test_stages_follow_each_other() -> None:
    assert [list(_SHAPE.layers_of(stage)) for stage in range(2)] == [[0, 1], [2, 3, 4]]
    assert (_SHAPE.pp_size, _SHAPE.num_layers) == (2, 5)
    assert list(_with_tp(2).ranks()) == list(
        itertools.starmap(Rank, [(0, 0), (0, 1), (1, 0), (1, 1)])
    )
    for stage in (-1, 2):
        with pytest.raises(ValueError, match=f"no stage {stage}"):
            _SHAPE.layers_of(stage)


@pytest.mark.parametrize(
    ("num_layers", "stages"),
    [
        (4, (4,)),
        (4, (2, 2)),
        (5, (3, 2)),
        (61, (15, 15, 16, 15)),
        (7, (2, 2, 2, 1)),
        (3, (1, 1, 1)),
    ],
)
def test_layers_are_divided_as_vllm_does(
    num_layers: int, stages: tuple[int, ...]
) -> None:
    assert split_layers(num_layers, len(stages)) == stages


def test_stages_without_layers_are_refused() -> None:
    for layers, stages in ((2, 3), (2, 0)):
        with pytest.raises(ValueError, match=f"{layers} layers cannot make {stages}"):
            split_layers(layers, stages)


def test_a_value_is_as_large_as_a_key_unless_it_is_said() -> None:
    assert _SHAPE.part_nbytes == (256, 256)
    assert msgspec.structs.replace(_SHAPE, value_nbytes=128).part_nbytes == (256, 128)


def test_shapes_of_one_model_differ_only_in_how_they_cut_it() -> None:
    other = msgspec.structs.replace(
        _with_tp(8), layout=KVLayout.fused("HND"), block_size=128, stages=(5,)
    )
    check_same_model(_SHAPE, other)
    with pytest.raises(IncompatiblePeer, match="num_layers is 5 here and 4 there"):
        check_same_model(_SHAPE, msgspec.structs.replace(other, stages=(4,)))


def test_a_peer_can_say_its_shape_and_no_nonsense() -> None:
    encoded = msgspec.msgpack.encode(_SHAPE)
    assert msgspec.msgpack.decode(encoded, type=EngineShape) == _SHAPE
    with pytest.raises(msgspec.ValidationError, match="tp_size=0"):
        msgspec.msgpack.decode(
            encoded.replace(b"\xa7tp_size\x01", b"\xa7tp_size\x00"), type=EngineShape
        )


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
