"""Toy caches that lie in memory as vLLM's may; ``test_layouts`` has vLLM's own."""

from __future__ import annotations

import functools
import types
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
import torch

from asynckv.config import KVRole, KVTransferConfig
from asynckv.connectors.caches import BlockMoves, PagedCaches
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.p2p.worker import P2PWorker
from asynckv.connectors.requests import P2PMetadata
from asynckv.connectors.store.packing import PackedBlocks
from asynckv.devices.copying import CopyPool
from asynckv.errors import ConfigError
from asynckv.integrations.vllm.pages import attention_of, pages_of
from asynckv.testing.blocked import until
from harness.gpu_workers import LOADED, SAVED, load_request, save_request

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = ("a", "b"), 9, 2, 16, 8
PAGE = HEADS * TOKENS * CONTENT
SIZE, GAP, OFFSET = len(LAYERS) * BLOCKS * PAGE, 48, 64


class Toy(NamedTuple):
    """``view``: of all memory, ``[L, B, H, N, C]``, as an engine sees it."""

    view: Callable[[torch.Tensor], torch.Tensor]
    layer_stride: int = BLOCKS * PAGE
    block_stride: int = PAGE
    offset: int = 0
    size: int = SIZE


def with_gaps(raw: torch.Tensor) -> torch.Tensor:
    pages = raw[OFFSET:].view(len(LAYERS), BLOCKS, PAGE + GAP)[..., :PAGE]
    return pages.view(len(LAYERS), BLOCKS, HEADS, TOKENS, CONTENT)


TOYS = {
    "permuted": Toy(
        lambda raw: raw.view(2, BLOCKS, TOKENS, HEADS, CONTENT).transpose(2, 3)
    ),
    "kernel blocks": Toy(
        lambda raw: raw.view(2, BLOCKS * 4, HEADS, TOKENS // 4, CONTENT)
    ),
    "permuted kernel blocks": Toy(
        lambda raw: raw.view(2, BLOCKS * 2, TOKENS // 2, HEADS, CONTENT).transpose(2, 3)
    ),
    "interleaved": Toy(
        lambda raw: raw.view(BLOCKS, 2, HEADS, TOKENS, CONTENT).transpose(0, 1),
        layer_stride=PAGE,
        block_stride=2 * PAGE,
    ),
    "gaps": Toy(
        with_gaps,
        layer_stride=BLOCKS * (PAGE + GAP),
        block_stride=PAGE + GAP,
        offset=OFFSET,
        size=OFFSET + 2 * BLOCKS * (PAGE + GAP),
    ),
}
every_toy = pytest.mark.parametrize("toy", TOYS.values(), ids=TOYS)


class Cache:
    """One engine's memory, what it sees there, and what its configuration says."""

    def __init__(self, toy: Toy, raw: torch.Tensor | None = None) -> None:
        noise = torch.randint(0, 256, (toy.size,), dtype=torch.uint8)
        self.toy, self.raw = toy, noise if raw is None else raw
        self.views = dict(zip(LAYERS, toy.view(self.raw), strict=True))
        self.config = config_of(toy)

    def registered(self) -> PagedCaches:
        return PagedCaches(pages_of(self.config, self.views), None)

    def with_blocks_of(self, other: Cache, moved: dict[int, int]) -> torch.Tensor:
        """Return what memory must be once these blocks have come from there."""
        after = Cache(self.toy, self.raw.clone())
        for layer in LAYERS:
            ours = after.views[layer].unflatten(0, (BLOCKS, -1))
            theirs = other.views[layer].unflatten(0, (BLOCKS, -1))
            for source, target in moved.items():
                ours[target] = theirs[source]
        return after.raw


def config_of(toy: Toy) -> Any:
    namespace = types.SimpleNamespace
    spec = namespace(page_size_bytes=PAGE, block_size=TOKENS)
    return namespace(
        num_blocks=BLOCKS,
        num_blocks_of=lambda tensor: BLOCKS,
        kv_cache_layout="of a toy",
        kv_cache_groups=[namespace(layer_names=list(LAYERS), kv_cache_spec=spec)],
        kv_cache_tensors=[
            namespace(
                layers=list(LAYERS),
                layer_stride=toy.layer_stride,
                block_stride=toy.block_stride,
                offset=toy.offset,
            )
        ],
    )


@every_toy
async def test_whole_blocks_move_and_nothing_else_is_touched(toy: Toy) -> None:
    there, here = Cache(toy), Cache(toy)
    wanted = here.with_blocks_of(there, {5: 0, 1: 6, 7: 3})
    spools = [
        PackedBlocks(BlockMoves(one.registered(), CopyPool()), 3)
        for one in (there, here)
    ]
    value = await spools[0].gather(((5, 1, 7),))
    await spools[1].scatter(value, ((0, 6, 3),))
    assert torch.equal(here.raw, wanted)


@every_toy
async def test_a_peer_has_the_same_bytes_in_its_own_blocks(toy: Toy) -> None:
    there, here = Cache(toy), Cache(toy)
    wanted = here.with_blocks_of(there, dict(zip(SAVED, LOADED, strict=True)))
    async with worker_of("kv_producer", there) as saves:
        saves.bind_connector_metadata(P2PMetadata(saves=(save_request("t"),)))
        await saves.wait_for_save()
        async with worker_of("kv_consumer", here) as loads:
            loads.bind_connector_metadata(P2PMetadata(loads=(load_request("t"),)))
            await loads.start_load_kv()
            await until(lambda: not loads.statistics().loading)
            assert not loads.get_finished().reasons
    assert torch.equal(here.raw, wanted)


@asynccontextmanager
async def worker_of(role: KVRole, cache: Cache) -> AsyncIterator[P2PWorker]:
    saves, url = role == "kv_producer", "mem://pages"
    extra: dict[str, object] = {"direction": "pull"}
    extra |= {"listen": url} if saves else {"peers": {"P": url}}
    config = KVTransferConfig(kv_role=role, kv_connector_extra_config=extra)
    engine = KVEngine(engine_id="P" if saves else "D", block_size=TOKENS)
    async with P2PWorker(config, engine) as worker:
        worker.register_kv_caches(pages_of(cache.config, cache.views))
        await worker.start()
        yield worker


def test_layers_that_read_the_kv_of_another_one_are_left_out() -> None:
    cache = Cache(TOYS["permuted"])
    views = {**cache.views, "reads a": cache.views["a"]}
    assert list(pages_of(cache.config, views)) == ["a", "b"]


HEADS_FIRST = Toy(
    lambda raw: raw.view(2, HEADS, BLOCKS, TOKENS, CONTENT).transpose(1, 2),
    block_stride=PAGE // HEADS,
)

INTERLEAVED_KERNEL_BLOCKS = Toy(
    lambda raw: raw.view(BLOCKS * 2, 2, HEADS, TOKENS // 2, CONTENT).transpose(0, 1),
    layer_stride=PAGE,
    block_stride=2 * PAGE,
)


@pytest.mark.parametrize(
    ("toy", "words"),
    [
        (INTERLEAVED_KERNEL_BLOCKS, "a block of a is not one run of bytes"),
        (HEADS_FIRST, "in the layout of a toy a block of a is not one run of bytes"),
        (TOYS["permuted"]._replace(offset=PAGE), "does not lie where its config"),
        (TOYS["permuted"]._replace(layer_stride=PAGE), "view of b, .* does not lie"),
        (TOYS["permuted"]._replace(block_stride=3 * PAGE), "do not lie in a cache"),
        (TOYS["interleaved"]._replace(block_stride=PAGE), "view of a, .* does not lie"),
    ],
)
def test_what_does_not_lie_as_it_was_said_is_refused(toy: Toy, words: str) -> None:
    cache = Cache(toy)
    with pytest.raises(ConfigError, match=words):
        pages_of(cache.config, cache.views)


def test_a_layer_that_is_missing_is_named() -> None:
    cache = Cache(TOYS["permuted"])
    with pytest.raises(ConfigError, match="registered no cache of the layer b"):
        pages_of(cache.config, {"a": cache.views["a"]})
    cache.config.kv_cache_tensors[0].layers = ["a"]
    with pytest.raises(ConfigError, match="where the blocks of b lie"):
        pages_of(cache.config, cache.views)


def test_a_layer_of_no_group_is_named() -> None:
    cache = Cache(TOYS["permuted"])
    cache.config.kv_cache_groups[0].layer_names = ["a"]
    with pytest.raises(ConfigError, match="registered no cache of the layer b"):
        pages_of(cache.config, cache.views)


def with_counts(count: int, in_pool: int = BLOCKS) -> Cache:
    """Return a cache whose configuration says that its tensor has so many blocks."""
    cache = Cache(TOYS["permuted"])
    cache.config.num_blocks = in_pool
    cache.config.num_blocks_of = lambda tensor: count
    return cache


def test_a_tensor_may_have_fewer_blocks_than_the_pool() -> None:
    cache = with_counts(BLOCKS, in_pool=2 * BLOCKS)
    pages = pages_of(cache.config, cache.views)
    assert [len(one) for one in pages.values()] == [BLOCKS, BLOCKS]


def test_a_view_of_more_blocks_than_were_said_is_refused() -> None:
    cache = with_counts(BLOCKS - 1)
    with pytest.raises(ConfigError, match="view of a, .* does not lie where"):
        pages_of(cache.config, cache.views)


def test_a_last_page_behind_the_end_of_memory_is_refused() -> None:
    cache = with_counts(BLOCKS + 1)
    cache.config.kv_cache_groups[0].layer_names = ["b"]
    (tensor,) = cache.config.kv_cache_tensors
    tensor.layers, tensor.offset = ["b"], tensor.layer_stride
    with pytest.raises(ConfigError, match="do not lie in a cache"):
        pages_of(cache.config, cache.views)


def test_the_stride_of_a_single_block_says_nothing() -> None:
    cache = with_counts(1)
    for layer, view in cache.views.items():
        shape, strides = (1, *view.shape[1:]), (1, *view.stride()[1:])
        cache.views[layer] = view.as_strided(shape, strides)
    assert [len(one) for one in pages_of(cache.config, cache.views).values()] == [1, 1]


@pytest.mark.parametrize(
    ("dtype", "stride"), [(torch.uint8, PAGE // 2 + 1), (torch.bfloat16, 160)]
)
def test_a_block_that_reaches_out_of_its_page_is_refused(
    dtype: torch.dtype, stride: int
) -> None:
    cache, page = Cache(TOYS["permuted"]), PAGE // dtype.itemsize
    memory = cache.raw.view(dtype)
    halves = memory.as_strided((BLOCKS, 2, page // 2), (page, stride, 1))
    cache.views["a"] = halves
    with pytest.raises(ConfigError, match="a block of a is not one run of bytes"):
        pages_of(cache.config, cache.views)


class One:
    pass


class Other:
    pass


def attention(toy: str, backends: Sequence[type] = (One, One)) -> str:
    cache, namespace = Cache(TOYS[toy]), types.SimpleNamespace
    modules = {
        layer: namespace(get_attn_backend=functools.partial(_same, backend))
        for layer, backend in zip(LAYERS, backends, strict=True)
    }
    forward = namespace(static_forward_context=modules)
    engine: Any = namespace(compilation_config=forward)
    return attention_of(engine, cache.config, cache.views)


def _same(value: type) -> type:
    return value


def test_backends_and_the_blocks_of_their_kernels_are_said() -> None:
    assert attention("permuted") == "One, kernel blocks of 16"
    assert attention("kernel blocks") == "One, kernel blocks of 4"


def test_which_layer_has_which_backend_is_part_of_it() -> None:
    mixed = attention("permuted", (One, Other))
    assert mixed.startswith("One, kernel blocks of 16 and Other, kernel blocks of 16")
    assert mixed != attention("permuted", (Other, One))
