"""Where vLLM keeps each layer's blocks, as plain bytes.

vLLM's configuration says where the page of a layer and a block begins, and how long it
is. The views that vLLM registers are permuted, and count the kernel's blocks, of which
a block that the scheduler counts may have several: they are only compared with that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from asynckv.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ("attention_of", "pages_of")


def pages_of(
    kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the blocks of each layer: ``[num_blocks, page_size_bytes]`` of ``uint8``.

    They are views of vLLM's memory. ``kv_caches`` are what it registers: its layers
    that only read another layer's KV are among them, and left out here.

    :raises ConfigError: a page is not one run of bytes, or the views do not lie where
        the configuration says
    """
    pages: dict[str, torch.Tensor] = {}
    specs = _specs_of(kv_cache_config)
    for tensor in kv_cache_config.kv_cache_tensors:
        count = int(kv_cache_config.num_blocks_of(tensor))
        for index, layer in enumerate(tensor.layers):
            if layer not in kv_caches or layer not in specs:
                raise ConfigError(f"vLLM has registered no cache of the layer {layer}")
            pages[layer] = _pages_at(
                kv_caches[layer],
                tensor.offset + index * tensor.layer_stride,
                (count, int(specs[layer].page_size_bytes)),
                tensor.block_stride,
            )
            _check_view(kv_caches[layer], pages[layer], layer, kv_cache_config)
    if missing := sorted(specs.keys() - pages.keys()):
        raise ConfigError(f"vLLM does not say where the blocks of {missing[0]} lie")
    return pages


def attention_of(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
) -> str:
    """Say which backends the layers have, and how many tokens a kernel's block has.

    The bytes of a page mean the same only where these are the same.
    """
    modules = vllm_config.compilation_config.static_forward_context
    found = []
    for layer, spec in _specs_of(kv_cache_config).items():
        ratio = len(kv_caches[layer]) // kv_cache_config.num_blocks
        backend = modules[layer].get_attn_backend().__name__
        found.append((backend, spec.block_size // ratio))
    words = [f"{backend}, kernel blocks of {size}" for backend, size in found]
    if len(set(words)) == 1:
        return words[0]
    digest = hashlib.blake2b(repr(found).encode(), digest_size=8).hexdigest()
    return f"{' and '.join(sorted(set(words)))}, {digest}"


def _specs_of(kv_cache_config: KVCacheConfig) -> dict[str, Any]:
    return {
        layer: group.kv_cache_spec
        for group in kv_cache_config.kv_cache_groups
        for layer in group.layer_names
    }


def _pages_at(
    view: torch.Tensor, start: int, shape: tuple[int, int], block_stride: int
) -> torch.Tensor:
    """Return pages of the memory that ``view`` is of."""
    storage, (count, nbytes) = view.untyped_storage(), shape
    if start + (count - 1) * block_stride + nbytes > storage.nbytes():
        raise ConfigError(
            f"{count} blocks of {nbytes} bytes from {start} on do not lie in a cache "
            f"of {storage.nbytes()} bytes"
        )
    pages = torch.empty(0, dtype=torch.uint8, device=view.device)
    return pages.set_(storage, start, shape, (block_stride, 1))


def _check_view(
    view: torch.Tensor, pages: torch.Tensor, layer: str, config: KVCacheConfig
) -> None:
    """Refuse pages that are not what ``view`` shows, block by block."""
    (count, nbytes), block_stride = pages.shape, pages.stride(0)
    ratio, rest = divmod(len(view), count)  # of kernel blocks to the scheduler's
    step = view.stride(0) * view.element_size() if len(view) > 1 else block_stride
    if rest or step * ratio != block_stride or view.data_ptr() != pages.data_ptr():
        raise ConfigError(
            f"vLLM's view of {layer}, {tuple(view.shape)}, does not lie where its "
            f"configuration says: {count} blocks of {nbytes} bytes"
        )
    if (ratio - 1) * step + _extent_of(view[0]) > nbytes:
        raise ConfigError(
            f"in the layout {config.kv_cache_layout} a block of {layer} is not one run "
            "of bytes: it cannot be moved",
            hint="set VLLM_KV_CACHE_LAYOUT, or the option kv_cache_layout, to LBNHC, "
            "LBHNC, BLNHC or BLHNC",
        )


def _extent_of(block: torch.Tensor) -> int:
    """Return how many bytes there are from its first element to its last one."""
    last = sum(
        (size - 1) * stride
        for size, stride in zip(block.shape, block.stride(), strict=True)
    )
    return (last + 1) * block.element_size()
