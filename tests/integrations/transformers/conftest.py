"""Tiny random models, prompts and what a single process makes of them."""

from __future__ import annotations

import functools
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DynamicCache,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    cache_utils,
)

from asynckv.abc import KVLookupBuffer
from asynckv.buffers.lookup import LookupBuffer
from asynckv.integrations.transformers import layers

COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "full": lambda: LlamaConfig(**COMMON | {"num_key_value_heads": 4}),
    "gqa": lambda: LlamaConfig(**COMMON),
    "sliding": lambda: MistralConfig(**COMMON, sliding_window=16),
    "mixed": lambda: Qwen2Config(
        **COMMON, use_sliding_window=True, sliding_window=16, max_window_layers=1
    ),
    "alternating": lambda: Gemma3TextConfig(
        **COMMON,
        head_dim=8,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "chunked": lambda: Llama4TextConfig(
        **COMMON,
        head_dim=8,
        attention_chunk_size=16,
        num_local_experts=2,
        intermediate_size_mlp=64,
    ),
    "dynamic": lambda: LlamaConfig(
        **COMMON,
        max_position_embeddings=25,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    ),
    "longrope": lambda: Phi3Config(
        **COMMON,
        max_position_embeddings=96,
        original_max_position_embeddings=24,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
        },
    ),
    "latent": lambda: DeepseekV3Config(
        **COMMON | {"num_key_value_heads": 4},
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=6,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_group=1,
        topk_group=1,
    ),
    "shared": lambda: Gemma4TextConfig(
        **COMMON
        | {
            "head_dim": 8,
            "global_head_dim": 16,
            "sliding_window": 16,
            "num_kv_shared_layers": 1,
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 8,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        }
    ),
}


@pytest.fixture
def planning_threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The thread of each time that a config is read for its layers."""
    names: list[str] = []
    read = cache_utils.get_layer_types_and_kwargs

    def noted(config: PreTrainedConfig) -> tuple[list[str], list[dict[str, Any]]]:
        names.append(threading.current_thread().name)
        return read(config)

    monkeypatch.setattr(layers, "get_layer_types_and_kwargs", noted)
    return names


ModelOf = Callable[..., PreTrainedModel]


@functools.cache
def _model(kind: str, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=dtype)
    built: PreTrainedModel = model.eval()
    return built


@pytest.fixture(scope="session")
def model_of() -> ModelOf:
    """Return the random model of a kind, always the same: ``model_of("sliding")``."""

    def model_of(
        kind: str = "gqa", dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> PreTrainedModel:
        return _model(kind, dtype, seed)

    return model_of


@pytest.fixture
def model(model_of: ModelOf) -> PreTrainedModel:
    return model_of("gqa")


@pytest.fixture
async def lookup() -> AsyncIterator[KVLookupBuffer]:
    async with LookupBuffer("64MiB", drain_s=0) as buffer:
        yield buffer


@pytest.fixture(scope="session")
def prompt() -> torch.Tensor:
    """Forty ids: longer than two windows."""
    return torch.randint(3, 128, (1, 40), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="session")
def padded() -> tuple[torch.Tensor, torch.Tensor]:
    """Three rows of thirty, two of them padded on the left, and their mask."""
    ids = torch.randint(3, 128, (3, 30), generator=torch.Generator().manual_seed(8))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    mask[2, :20] = 0
    return ids, mask


@pytest.fixture(scope="session")
def reference() -> Callable[..., torch.Tensor]:
    """Return what plain ``generate`` gives, greedily, in this process."""

    def reference(
        model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        mask = torch.ones_like(ids) if mask is None else mask
        options = {"max_new_tokens": 8, "do_sample": False} | options
        sequences: torch.Tensor = model.generate(ids, attention_mask=mask, **options)
        return sequences

    return reference


@pytest.fixture(scope="session")
def split_reference() -> Callable[..., torch.Tensor]:
    """Prefill, then continue from the very cache, in this process."""

    def split_reference(
        model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, steps: int = 8
    ) -> torch.Tensor:
        mask = torch.ones_like(ids) if mask is None else mask
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            output = model(
                ids, attention_mask=mask, position_ids=positions, past_key_values=cache
            )
        first = output.logits[:, -1:].argmax(-1)
        sequences: torch.Tensor = model.generate(
            torch.cat([ids, first], dim=1),
            attention_mask=torch.cat([mask, torch.ones_like(first)], dim=1),
            past_key_values=cache,
            max_new_tokens=steps - 1,
            do_sample=False,
        )
        return sequences

    return split_reference
