"""What vLLM's configuration says to asynckv: whom to talk to, and what must be equal.

How KV lies in a block is the attention backend's own affair, so blocks move whole, and
between engines only whose fingerprints say that a block means the same to both.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import torch

from asynckv.abc import KVConnectorScheduler, KVConnectorWorker
from asynckv.config import KVTransferConfig
from asynckv.connectors import KVEngine, make_scheduler, make_worker
from asynckv.connectors.options import (
    VLLM_MODES,
    ConnectorOptions,
    config_for_vllm,
    url_of_rank,
)
from asynckv.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ("Settings",)

logger = logging.getLogger("vllm.asynckv")  # vLLM shows only what is below "vllm"

_GRACE_S: Final = 30.0
_EXPERTS: Final = "; only models without experts may have more"
_NOT_THE_MODEL: Final = frozenset(
    {"_name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype"}
)
"""What a model's configuration says of where it was read, and what is told apart."""
_WHOLE_PROMPT: Final = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
"""Specs of layers that keep the KV of every token of a prompt."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """One engine's configuration, as one of its processes sees it."""

    config: KVTransferConfig
    engine: KVEngine
    groups: Mapping[str, int]

    @classmethod
    def of(
        cls,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        *,
        side: Literal["scheduler", "worker"],
        attention: str = "",
    ) -> Settings:
        """Read what vLLM was told.

        ``attention`` is what workers say once their caches are registered.

        :raises ConfigError: an option that is none, or what cannot be moved yet
        """
        _check_parallelism(vllm_config)
        _check_groups(kv_cache_config, vllm_config.cache_config.block_size)
        parallel = vllm_config.parallel_config
        engine = KVEngine(
            engine_id=vllm_config.kv_transfer_config.engine_id,
            block_size=vllm_config.cache_config.block_size,
            rank=parallel.rank if side == "worker" else 0,
            tp_size=parallel.tensor_parallel_size,
            holds_saved_blocks=True,
            block_nbytes=sum(
                group.kv_cache_spec.page_size_bytes * len(group.layer_names)
                for group in kv_cache_config.kv_cache_groups
            ),
        )
        groups = {
            layer: number
            for number, group in enumerate(kv_cache_config.kv_cache_groups)
            for layer in group.layer_names
        }
        config = _config_of(vllm_config, kv_cache_config, attention)
        return cls(config, engine, groups)

    @property
    def sees_all(self) -> bool:
        """Whether also requests that carry nothing may move something."""
        return self.config.kv_connector != VLLM_MODES["p2p"]

    @property
    def reports_saves(self) -> bool:
        """Whether a worker tells when each request's blocks are no longer read."""
        return self.config.kv_connector == VLLM_MODES["p2p"]

    @property
    def longest_save_s(self) -> float:
        """How long a save may read blocks, at the very most."""
        return ConnectorOptions.of(self.config).save_timeout_s + _GRACE_S

    def make_scheduler(self) -> KVConnectorScheduler:
        """Return the side that decides, and log what its KV is put with."""
        if (fingerprint := self.config.fingerprint) is not None:
            logger.info("the fingerprint of KV here is %s", fingerprint.as_text())
        return make_scheduler(self.config, self.engine)

    def make_worker(self) -> KVConnectorWorker:
        """Return the side that moves bytes."""
        return make_worker(self.config, self.engine)


def _config_of(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, attention: str
) -> KVTransferConfig:
    given = vllm_config.kv_transfer_config
    extra: dict[str, object] = dict(given.kv_connector_extra_config)
    version = extra.get("layout_version")
    extra["fingerprint"] = {
        **_fingerprint(vllm_config, kv_cache_config, extra.get("fingerprint")),
        "details": _details(vllm_config, version, attention),
    }
    config = config_for_vllm(
        KVTransferConfig(
            engine_id=given.engine_id,
            kv_role=given.kv_role,
            kv_connector_extra_config=extra,
            kv_load_failure_policy=given.kv_load_failure_policy,
        )
    )
    return _on_own_ports(config, vllm_config.parallel_config)


def _on_own_ports(config: KVTransferConfig, parallel: Any) -> KVTransferConfig:
    """Let each data parallel rank listen behind the ranks of those before it.

    vLLM makes engines of their own of them where the model has no experts: each then
    says that there is one, and its number is all that tells them apart.
    """
    number = getattr(parallel, "data_parallel_index", None) or 0
    if not number:
        return config
    extra = dict(config.kv_connector_extra_config)
    listen = ConnectorOptions.of(config).listen or config.url
    extra["listen"] = url_of_rank(listen, number * parallel.tensor_parallel_size)
    return msgspec.structs.replace(config, kv_connector_extra_config=extra)


def _fingerprint(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, name: object
) -> dict[str, str]:
    """Say what must be equal. ``name`` is what its users call the model.

    Weights cannot be compared: a path, and its revision, stand for them.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    specs = [
        (
            group.layer_names,
            type(group.kv_cache_spec).__name__,
            group.kv_cache_spec.block_size,
            group.kv_cache_spec.page_size_bytes,
        )
        for group in kv_cache_config.kv_cache_groups
    ]
    layout = [specs, getattr(kv_cache_config, "kv_cache_layout", None), _machine()]
    digest = hashlib.blake2b(msgspec.json.encode(layout), digest_size=8).hexdigest()
    # In words what the digest alone would not tell: a rank's blocks are its heads'.
    ranks, size = parallel.tensor_parallel_size, cache.block_size
    return {
        "model": name if isinstance(name, str) else _named(model),
        "dtype": f"{model.dtype}, kv {cache.cache_dtype}",
        "layout": f"ranks: {ranks}, blocks of {size}, {digest}",
    }


def _named(model: Any) -> str:
    return f"{model.model}@{model.revision}" if model.revision else str(model.model)


def _details(vllm_config: VllmConfig, layout_version: object, attention: str) -> str:
    """Return what decides on the bytes of a block beside the model and its shape.

    They are opaque, and another vLLM may mean others, unless a ``layout_version`` says
    that it does not.
    """
    model = vllm_config.model_config
    version = f"vllm {getattr(sys.modules.get('vllm'), '__version__', 'unknown')}"
    if layout_version is not None:
        version = f"layout_version {layout_version}"
    hf = model.hf_config.to_dict()
    digest = hashlib.blake2b(repr(_plain(hf)).encode(), digest_size=8).hexdigest()
    # vLLM takes one of two sets of frequencies by what --max-model-len allows.
    ropes = dict.fromkeys(
        ", rope for "
        + (f"more than {most}" if model.max_model_len > most else f"up to {most}")
        + " tokens"
        for most in _longrope_limits(hf)
    )
    return (
        f"{version}, attention: {attention or 'not known yet'}, "
        f"quantization: {model.quantization}, config: {digest}{''.join(ropes)}"
    )


def _longrope_limits(value: object) -> Iterator[int]:
    """Yield beyond how many tokens the long frequencies count, of each such rope."""
    if isinstance(value, Mapping):
        if value.get("rope_type") == "longrope":
            yield value["original_max_position_embeddings"]
        for one in value.values():
            yield from _longrope_limits(one)


def _plain(value: object) -> object:
    """Return what is equal where a model's configuration is, whoever has read it."""
    if isinstance(value, Mapping):
        return sorted(
            (str(name), _plain(one))
            for name, one in value.items()
            if name not in _NOT_THE_MODEL
        )
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    return type(value).__name__  # nothing that may hold an address


def _machine() -> str:
    """Return what a CPU kernel chooses its layout by."""
    if torch.cuda.is_available():
        return "cuda"
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    return f"{torch.backends.cpu.get_cpu_capability()}, amx {has_amx}"


def _check_parallelism(vllm_config: VllmConfig) -> None:
    parallel = vllm_config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "data_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        size = getattr(parallel, name, 1)
        if size != 1:
            raise ConfigError(
                f"{name} is {size}: KV of tensor parallel ranks alone is moved yet",
                hint=f"set {name} to 1" + _EXPERTS * (name == "data_parallel_size"),
            )


def _check_groups(kv_cache_config: KVCacheConfig, block_size: int) -> None:
    for group in kv_cache_config.kv_cache_groups:
        if group.host_resident or not group.enable_kv_transfer:
            raise ConfigError(
                f"layers like {group.layer_names[0]} have blocks that vLLM keeps in "
                "host memory, or makes anew: they cannot be moved yet",
                hint="leave hisparse_config out",
            )
        kind = type(group.kv_cache_spec).__name__
        if kind not in _WHOLE_PROMPT:
            raise ConfigError(
                f"layers like {group.layer_names[0]} are of a {kind}, which does not "
                "keep a whole prompt, or is not known to",
                hint="--disable-hybrid-kv-cache-manager makes sliding windows full "
                "attention in models that have both; others cannot be moved yet",
            )
        tokens = group.kv_cache_spec.block_size
        if tokens != block_size:
            raise ConfigError(
                f"layers like {group.layer_names[0]} have blocks of {tokens} tokens, "
                f"and others of {block_size} (block_size): they cannot be moved yet",
                hint=f"--block-size {tokens} may give all layers the same",
            )
