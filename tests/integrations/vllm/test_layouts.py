"""Every layout of vLLM, as vLLM itself allocates and views it; no engine is started."""

from __future__ import annotations

import itertools
import types
from typing import Any, Final

import pytest
import torch

from asynckv.connectors.caches import BlockMoves, PagedCaches
from asynckv.connectors.store.packing import PackedBlocks
from asynckv.devices.copying import CopyPool
from asynckv.errors import ConfigError
from asynckv.integrations.vllm.pages import pages_of

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_is_imported")]

LAYOUTS: Final = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
HEADS: Final = {"MHA": 8, "GQA": 2, "MQA": 1, "MLA": 1}
BLOCK, BLOCKS = 64, 7
KERNELS: Final = (BLOCK, BLOCK // 2, BLOCK // 4)
DTYPES: Final = (
    *(torch.float32, torch.bfloat16, torch.float16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8),
)
MOVED: Final = {3: 5, 1: 0, 6: 2}


class Cache:
    """What vLLM allocates and views for groups of layers, full of noise."""

    def __init__(self, layout: str, kernel: int, *specs: Any) -> None:
        from vllm.v1.kv_cache_interface import KVCacheLayout
        from vllm.v1.worker.utils import allocate_kv_cache

        self.made_of = (layout, kernel, *specs)
        self.config = _config_of(KVCacheLayout[layout], specs)
        device, sizes = torch.device("cpu"), [kernel] * len(specs)
        self.views: dict[str, torch.Tensor] = allocate_kv_cache(
            self.config, device, KVCacheLayout[layout], sizes
        )
        for view in self.views.values():
            noise = torch.randint(0, 256, (*view.shape[:-1], _width(view)))
            view.view(torch.uint8).copy_(noise)

    @property
    def memory(self) -> torch.Tensor:
        """All bytes, also those that no view shows."""
        storage = next(iter(self.views.values())).untyped_storage()
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    def packed(self, num_blocks: int) -> PackedBlocks:
        groups = {
            layer: number
            for number, group in enumerate(self.config.kv_cache_groups)
            for layer in group.layer_names
        }
        pages = pages_of(self.config, self.views)
        moves = BlockMoves(PagedCaches(pages, None, groups), CopyPool())
        return PackedBlocks(moves, num_blocks)

    def with_blocks_of(self, other: Cache, moved: list[dict[int, int]]) -> Cache:
        """Return what this must be once these blocks of each group have come."""
        after = Cache(*self.made_of)
        after.memory.copy_(self.memory)
        for group, blocks in zip(self.config.kv_cache_groups, moved, strict=True):
            for layer in group.layer_names:
                ours, theirs = _blocks_in(after, layer), _blocks_in(other, layer)
                for source, target in blocks.items():
                    ours[target] = theirs[source]
        return after


def _blocks_in(cache: Cache, layer: str) -> torch.Tensor:
    from vllm.v1.kv_cache_interface import group_kernel_blocks

    view = cache.views[layer].view(torch.uint8)
    grouped: torch.Tensor = group_kernel_blocks(view, BLOCKS)
    return grouped


def _width(view: torch.Tensor) -> int:
    return view.shape[-1] * view.element_size()


def _config_of(layout: Any, specs: tuple[Any, ...]) -> Any:
    """Let vLLM say where it puts the layers: three for each spec."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

    groups = [
        KVCacheGroupSpec([f"layers.{3 * number + one}" for one in range(3)], spec)
        for number, spec in enumerate(specs)
    ]
    engine = types.SimpleNamespace(
        attention_config=types.SimpleNamespace(hisparse_config=None),
        cache_config=types.SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=BLOCKS,
            prefix_cache_retention_interval=None,
        ),
    )
    config = get_kv_cache_config_from_groups(engine, groups, 2**30)
    config.kv_cache_layout = layout.name
    return config


def _spec_of(kind: str, dtype: torch.dtype, **given: Any) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    named = MLAAttentionSpec if kind == "MLA" else FullAttentionSpec
    options = {"block_size": BLOCK, "num_kv_heads": HEADS[kind], "head_size": 8}
    return named(**options, dtype=dtype, **given)


def _is_refused_by_vllm(layout: str, kind: str, kernel: int) -> bool:
    """It splits no block that has other layers', or other heads', blocks between."""
    is_whole = layout.startswith("LB") or (layout == "LHBNC" and HEADS[kind] == 1)
    return kernel != BLOCK and not is_whole


def _is_refused_here(layout: str, kind: str) -> bool:
    """A block of several heads is not one run of bytes."""
    return layout in ("LHBNC", "BHLNC") and HEADS[kind] > 1


async def _move_exactly(*made_of: Any, moved: list[dict[int, int]]) -> None:
    there, here = Cache(*made_of), Cache(*made_of)
    wanted, count = here.with_blocks_of(there, moved), len(moved[0])
    sources = tuple(tuple(blocks) for blocks in moved)
    targets = tuple(tuple(blocks.values()) for blocks in moved)
    value = await there.packed(count).gather(sources)
    await here.packed(count).scatter(value, targets)
    for layer, view in wanted.views.items():
        found = here.views[layer].view(torch.uint8)
        assert torch.equal(found, view.view(torch.uint8)), layer
    assert torch.equal(here.memory, wanted.memory)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_every_byte_of_a_block_moves_or_the_layout_is_refused_by_name(
    layout: str, kind: str
) -> None:
    for kernel, dtype in itertools.product(KERNELS, DTYPES):
        spec = _spec_of(kind, dtype)
        if _is_refused_by_vllm(layout, kind, kernel):
            with pytest.raises(ValueError, match="does not store blocks as dense"):
                Cache(layout, kernel, spec)
        elif _is_refused_here(layout, kind):
            with pytest.raises(ConfigError, match=f"in the layout {layout} a block"):
                Cache(layout, kernel, spec).packed(1)
        else:
            await _move_exactly(layout, kernel, spec, moved=[MOVED])


def test_it_is_known_of_every_layout_of_vllm() -> None:
    from vllm.v1.kv_cache_interface import KVCacheLayout

    assert {one.name for one in KVCacheLayout} == set(LAYOUTS)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
async def test_pages_that_are_padded_or_packed_move_whole(layout: str) -> None:
    padded = _spec_of("GQA", torch.bfloat16, page_size_padded=5000)
    await _move_exactly(layout, BLOCK, padded, moved=[MOVED])
    packed = _spec_of(
        "MLA", torch.uint8, state_content_bytes=656, cache_dtype_str="fp8_ds_mla"
    )
    kernel = BLOCK // 2 if layout.startswith("L") else BLOCK
    await _move_exactly(layout, kernel, packed, moved=[MOVED])


@pytest.mark.parametrize("layout", ["LBNHC", "BLHNC"])
async def test_groups_that_share_memory_have_blocks_of_their_own(layout: str) -> None:
    specs = [_spec_of("GQA", torch.bfloat16)] * 2
    moved = [{3: 5, 1: 0}, {2: 4, 6: 1}]
    await _move_exactly(layout, BLOCK, *specs, moved=moved)
