"""The paged caches of one rank: pools of blocks by layer, read and written in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from asynckv.abc import BlockIds
from asynckv.parallel.shapes import EngineShape
from asynckv.tensors.blocks import KVBlocks
from asynckv.types import TensorSpec

__all__ = ("REGION_NAMES", "PagedCaches")

REGION_NAMES = ("key", "value")
"""What the pools of a layer are called in an entry; a fused one is all ``key``."""


class PagedCaches:
    """Layers in the order of the model, and each one's pools: blocks come first.

    With a layout that splits keys from values a layer's tensor holds two pools,
    otherwise it is one. All are in host memory, or on one GPU. ``groups`` says which
    of a request's lists of blocks is whose.

    :raises ValueError: they are no such caches, or have no plain contiguous blocks
    """

    def __init__(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        shape: EngineShape | None,
        groups: Mapping[str, int] | None = None,
    ) -> None:
        if not kv_caches:
            raise ValueError("there is no cache to register")
        self._pools = {
            layer: _pools_of(layer, cache, shape) for layer, cache in kv_caches.items()
        }
        self._groups = dict(groups or {})
        self.layers = tuple(self._pools)
        devices = {pool.device for pools in self._pools.values() for pool in pools}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"the caches of one rank are on several devices: {names}")
        (self.device,) = devices

    @classmethod
    def across_layers(
        cls,
        kv_cache: torch.Tensor,
        layer_names: Sequence[str],
        shape: EngineShape | None,
    ) -> PagedCaches:
        """Take one tensor for all layers, layers first, or blocks first by layout.

        :raises ValueError: there are not as many layers as names
        """
        if shape is not None and shape.layout.is_across_layers:
            return cls({"layers": kv_cache}, shape)
        if len(kv_cache) != len(layer_names):
            raise ValueError(
                f"the tensor has {len(kv_cache)} layers, {len(layer_names)} have names"
            )
        layers = dict(zip(layer_names, kv_cache, strict=True))
        return cls(layers, shape)

    @property
    def is_on_gpu(self) -> bool:
        """Whether they are on a GPU; else they are in host memory."""
        return self.device.type == "cuda"

    def group_of(self, layer: str) -> int:
        """Return which of a request's lists of blocks is the layer's."""
        return self._groups.get(layer, 0)

    def pools(self, layer: str) -> tuple[torch.Tensor, ...]:
        """Return the pools of a layer, keys first."""
        return self._pools[layer]

    def blocks(self, layer: str, block_ids: BlockIds) -> dict[str, KVBlocks]:
        """Return a request's blocks of one layer, by their names in an entry.

        :raises IndexError: there is no block of such an id, or no such group
        """
        ids = block_ids[self.group_of(layer)]
        return {
            f"{layer}.{name}": KVBlocks(pool, ids)
            for name, pool in zip(REGION_NAMES, self._pools[layer], strict=False)
        }

    def specs(self, block_ids: BlockIds) -> dict[str, TensorSpec]:
        """Return what an entry of these blocks holds."""
        return {
            name: blocks.spec
            for layer in self.layers
            for name, blocks in self.blocks(layer, block_ids).items()
        }


def _pools_of(
    layer: str, cache: torch.Tensor, shape: EngineShape | None
) -> tuple[torch.Tensor, ...]:
    if cache.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{layer} is on {cache.device}, not a GPU and not the host's")
    is_split = shape is not None and shape.layout.split_k_and_v
    if is_split and (not cache.dim() or len(cache) != 2):
        raise ValueError(f"{layer}: keys first, then values, is not {cache.shape}")
    pools = (cache[0], cache[1]) if is_split else (cache,)
    for pool in pools:
        try:
            KVBlocks(pool, ())
        except ValueError as exc:
            raise ValueError(f"{layer}: {exc}") from exc
    return pools
