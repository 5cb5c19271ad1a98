from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
import torch

from asynckv.connectors.caches import BlockMoves, PagedCaches
from asynckv.connectors.engine import EntryHeader, KVEngine
from asynckv.connectors.p2p.load import Assembly, Scratch
from asynckv.connectors.requests import LoadRequest
from asynckv.devices.copying import CopyPool
from asynckv.errors import IncompatiblePeer
from asynckv.parallel.shapes import EngineShape, KVLayout, Rank
from asynckv.testing.blocked import until
from asynckv.types import TensorSpec
from harness.engines.toy_model import ToyModel
from harness.engines.toy_pairs import toy_shape
from harness.engines.toy_rank import ToyRank
from harness.fake_devices import FakeDevice, lanes_of

DEEP = ToyModel(heads=4)


def engine_of(tp_size: int, rank: int = 0) -> KVEngine:
    shape = toy_shape(DEEP, tp_size=tp_size)
    return KVEngine(
        engine_id="e", block_size=16, rank=rank, tp_size=tp_size, shape=shape
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"block_size": 16, "rank": 2, "tp_size": 2}, "rank 2 of 2"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 32, "shape": toy_shape(DEEP)}, "the shape is of"),
    ],
)
def test_an_engine_that_cannot_be_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        KVEngine(engine_id="e", **given)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        *(("block_size", one) for one in ("16", None, True, 16.0)),
        *(("rank", "0"), ("tp_size", 1.0), ("block_nbytes", "16MiB")),
        *(("engine_id", 7), ("shape", {"tp_size": 1}), ("holds_saved_blocks", 1)),
    ],
)
def test_a_field_of_an_engine_that_is_of_another_type_is_named(
    field: str, wrong: object
) -> None:
    with pytest.raises(TypeError, match=f"{field} is "):
        KVEngine(**{"engine_id": "e", "block_size": 16, field: wrong})  # type: ignore[arg-type]


def test_a_prompt_takes_whole_blocks() -> None:
    engine = engine_of(1)
    assert [engine.blocks_of(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert KVEngine(engine_id="e", block_size=1).blocks_of(3) == 3
    assert engine_of(2, 1).place == Rank(0, 1)


def test_readers_and_sources_agree() -> None:
    prefill, decode = engine_of(1), engine_of(2, 1)
    assert prefill.readers_in(toy_shape(DEEP, tp_size=2)) == (0, 1)
    assert tuple(decode.reads_from(prefill.shape)) == (0,)
    assert tuple(engine_of(1).reads_from(decode.shape)) == (0, 1)


def test_of_replicated_heads_some_ranks_have_no_reader() -> None:
    eight = [engine_of(8, rank) for rank in range(8)]
    readers = [one.readers_in(toy_shape(DEEP, tp_size=4)) for one in eight]
    assert sorted(readers) == [(), (), (), (), (0,), (1,), (2,), (3,)]


def test_without_a_shape_ranks_read_from_their_like() -> None:
    plain = KVEngine(engine_id="e", block_size=16, rank=1, tp_size=2)
    assert plain.reads_from(None) == {1: None}
    assert plain.readers_in(plain.shape_over(2)) == (1,)
    with pytest.raises(IncompatiblePeer) as caught:
        plain.reads_from(toy_shape(DEEP))
    assert caught.value.field == "layout"


def stages_of(*stages: int, rank: int = 0) -> KVEngine:
    shape = msgspec.structs.replace(toy_shape(DEEP), stages=stages)
    return KVEngine(engine_id="e", block_size=16, rank=rank, shape=shape)


def test_ranks_of_stages_are_divided_by_their_number() -> None:
    for rank in (0, 1):
        engine = stages_of(2, 2, rank=rank)
        assert engine.readers_in(engine.shape_over(2)) == (rank,)
        assert engine.readers_in(engine.shape_over(4)) == (2 * rank, 2 * rank + 1)
        assert engine.readers_in(engine.shape_over(pp_size=1)) == (0,)
    whole = stages_of(4)
    for shape in (whole.shape_over(2, tp_size=1), whole.shape_over(pp_size=2)):
        assert whole.readers_in(shape) == (0, 1)


def test_ranks_that_do_not_make_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="3 ranks are not 2 stages"):
        stages_of(2, 2).shape_over(3)
    with pytest.raises(ValueError, match="5 stages"):
        stages_of(2, 2).shape_over(pp_size=5)


def test_layers_of_a_read_are_those_of_its_stage_or_all_that_lie_together() -> None:
    second = stages_of(2, 2, rank=1)
    (read,) = second.reads_from(second.shape).values()
    assert second.layers_of(read, ("c", "d")) == ("c", "d")
    (whole,) = second.reads_from(stages_of(4).shape).values()
    assert second.layers_of(whole, ("c", "d")) == ("c", "d")
    shape = toy_shape(DEEP, layout=KVLayout.named("BLHNC"))
    together = KVEngine(engine_id="e", block_size=16, shape=shape)
    (read,) = together.reads_from(shape).values()
    assert together.layers_of(read, ("layers",)) == ("layers",)


MODEL = ToyModel(layers=2)
TOKENS = list(range(20))


def assembly_of(
    theirs: EngineShape,
    header_shape: EngineShape | None,
    names: tuple[str, ...],
    *,
    first_block: int = 0,
    rank: int = 0,
    changes: Mapping[str, str | None] = types.MappingProxyType({}),
) -> tuple[Assembly, ToyRank, ToyRank]:
    ours = toy_shape(MODEL, block_size=8)
    engine = KVEngine(engine_id="D", block_size=8, shape=ours)
    source, target = ToyRank(MODEL, theirs, 0, 8), ToyRank(MODEL, ours, 0, 8)
    ids = (5, 0, 2)[first_block:]
    order = LoadRequest("r", "t", "P", (ids,), first_block=first_block, num_tokens=20)
    header = EntryHeader(
        engine_id="P",
        rank=rank,
        block_size=theirs.block_size,
        layers=names,
        shape=header_shape,
    )
    source_ids = (3, 1) if theirs.block_size > 8 else (3, 1, 4)
    caches = dict(zip(names, source.caches.values(), strict=False))
    specs = PagedCaches(caches, theirs).specs((source_ids,))
    for name, spec in changes.items():
        if spec is None:
            del specs[name]
        else:
            specs[name] = TensorSpec(specs[name].shape, spec)
    read = engine.reads_from(theirs)[rank]
    moves = BlockMoves(PagedCaches(target.caches, ours), CopyPool())
    scratch = Scratch(moves, order, None)
    return Assembly(engine, scratch, header, read, specs), source, target


async def test_heads_and_tokens_come_to_where_they_are_here() -> None:
    theirs = toy_shape(MODEL, block_size=16)
    assembly, source, target = assembly_of(theirs, theirs, MODEL.layer_names)
    for layer in MODEL.layer_names:
        source.write(layer, [3, 1], TOKENS, 0)
        cache = source.caches[layer]
        assert assembly.land(f"{layer}.key", cache[0][[3, 1]]) is None
        assert assembly.land(f"{layer}.value", cache[1][[3, 1]]) == layer
        assert await assembly.place(layer) == layer
        there = target.read(layer, [5, 0, 2], 20)
        assert torch.equal(there, source.read(layer, [3, 1], 20))
    assert assembly.land("another layer.key", torch.zeros(1)) is None
    assert assembly.layers == MODEL.layer_names


class _Watched(torch.Tensor):
    """A tensor that notes which threads look at it."""

    threads: set[int]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        cls.threads.add(threading.get_ident())
        run = super().__torch_function__
        return run(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


async def test_nothing_that_came_is_looked_at_on_the_loop() -> None:
    theirs = toy_shape(MODEL, block_size=16)
    assembly, source, _ = assembly_of(theirs, theirs, MODEL.layer_names)
    layer = MODEL.layer_names[0]
    for region, name in enumerate(("key", "value")):
        came = source.caches[layer][region][[3, 1]].as_subclass(_Watched)
        assembly.land(f"{layer}.{name}", came)
    _Watched.threads = set()
    await assembly.place(layer)
    assert _Watched.threads
    assert threading.get_ident() not in _Watched.threads


@pytest.mark.parametrize(
    ("block_size", "names", "field"),
    [(32, MODEL.layer_names, "shape"), (16, ("one",), "layers")],
)
def test_a_header_that_says_something_else_than_its_request_is_refused(
    block_size: int, names: tuple[str, ...], field: str
) -> None:
    said = toy_shape(MODEL, block_size=block_size)
    with pytest.raises(IncompatiblePeer) as caught:
        assembly_of(toy_shape(MODEL, block_size=16), said, names)
    assert caught.value.field == field


def test_whole_blocks_must_be_equal_and_enough() -> None:
    engine = KVEngine(engine_id="D", block_size=4)
    moves = BlockMoves(PagedCaches({"a": torch.zeros(8, 3)}, None), CopyPool())
    header = EntryHeader(engine_id="P", rank=0, block_size=4, layers=("a",))
    order = LoadRequest("r", "t", "P", ((5, 0),), first_block=1, num_tokens=12)
    scratch = Scratch(moves, order, None)
    for spec in (
        TensorSpec((2, 3), "float32"),
        TensorSpec((3, 4), "float32"),
        TensorSpec((3, 3), "int32"),
    ):
        with pytest.raises(IncompatiblePeer, match=r"asked for|int32 there"):
            Assembly(engine, scratch, header, None, {"a.key": spec})
    good = {"a.key": TensorSpec((3, 3), "float32")}
    assert Assembly(engine, scratch, header, None, good).layers == ("a",)


FIRST, LAST = MODEL.layer_names
LACKS = "blocks that were asked for"


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({f"{LAST}.value": None}, LAST, LACKS),
        ({f"{FIRST}.key": None}, FIRST, LACKS),
        ({f"{LAST}.key": None, f"{LAST}.value": None}, LAST, LACKS),
        ({f"{LAST}.value": "float32"}, "dtype", "float32"),
    ],
)
def test_a_layer_without_its_tensors_or_of_another_dtype_is_refused(
    block_size: int, changes: dict[str, str | None], field: str, words: str
) -> None:
    theirs = toy_shape(MODEL, block_size=block_size)
    with pytest.raises(IncompatiblePeer, match=words) as caught:
        assembly_of(theirs, theirs, MODEL.layer_names, changes=changes)
    assert caught.value.field == field


def test_a_tensor_that_comes_twice_is_refused() -> None:
    theirs = toy_shape(MODEL, block_size=16)
    assembly, source, _ = assembly_of(theirs, theirs, MODEL.layer_names)
    layer = MODEL.layer_names[0]
    key = source.caches[layer][0][[3, 1]]
    assert assembly.land(f"{layer}.key", key) is None
    with pytest.raises(IncompatiblePeer, match="twice"):
        assembly.land(f"{layer}.key", key)


@pytest.mark.parametrize("has_come", [True, False])
async def test_megabytes_on_their_way_to_a_gpu_are_not_freed_on_the_loop(
    has_come: bool, gpu: FakeDevice
) -> None:
    cache, freed_by = gpu.tensor(torch.ones(4, 2**19)), list[int]()
    pool = CopyPool(lanes=lanes_of(gpu))
    order = LoadRequest("r", "t", "P", ((3,),), num_tokens=8)
    scratch = Scratch(BlockMoves(PagedCaches({"a": cache}, None), pool), order, None)
    weakref.finalize(
        scratch.landing("a")[0], lambda: freed_by.append(threading.get_ident())
    )
    if has_come:
        await scratch.leave("a")
    scratch.drop()
    await until(lambda: bool(freed_by))
    assert freed_by != [threading.get_ident()]
    assert cache.cpu()[3].any() != has_come
    pool.close()
    await until(lambda: not any("asynckv-" in t.name for t in threading.enumerate()))


@pytest.mark.parametrize("block_size", [8, 16])
async def test_blocks_before_the_first_that_is_loaded_are_left_alone(
    block_size: int,
) -> None:
    theirs = toy_shape(MODEL, block_size=block_size)
    names, ids = MODEL.layer_names, [3, 1] if block_size > 8 else [3, 1, 4]
    assembly, source, target = assembly_of(theirs, theirs, names, first_block=1)
    for layer in names:
        source.write(layer, ids, TOKENS, 0)
        for name, region in zip(("key", "value"), source.caches[layer], strict=True):
            assembly.land(f"{layer}.{name}", region[ids])
        await assembly.place(layer)
        there = target.read(layer, [5, 0, 2], 20)
        assert torch.equal(there[8:], source.read(layer, ids, 20)[8:])
        assert there[:8].eq(-1).all()


async def test_a_layer_of_a_later_stage_is_the_layer_of_its_number_here() -> None:
    theirs = msgspec.structs.replace(toy_shape(MODEL, block_size=16), stages=(1, 1))
    assembly, source, target = assembly_of(theirs, theirs, ("theirs",), rank=1)
    source.write(MODEL.layer_names[1], [3, 1], TOKENS, 0)
    for name, region in zip(
        ("key", "value"), source.caches[MODEL.layer_names[1]], strict=True
    ):
        assembly.land(f"theirs.{name}", region[[3, 1]])
    assert await assembly.place("theirs") == MODEL.layer_names[1]
    there = target.read(MODEL.layer_names[1], [5, 0, 2], 20)
    assert torch.equal(there, source.read(MODEL.layer_names[1], [3, 1], 20))
