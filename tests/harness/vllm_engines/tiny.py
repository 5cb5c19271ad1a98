"""A Llama of random weights, a few MiB on disk, and prompts for it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

__all__ = ("VOCABULARY", "make_tiny_model", "random_prompt")

VOCABULARY: Final = 512


def make_tiny_model(folder: Path, *, seed: int = 0) -> Path:
    """Write config and weights to ``folder``, of each seed always the same.

    The weights are large enough that greedy tokens depend on the whole prompt.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def random_prompt(length: int, *, seed: int) -> list[int]:
    """Return token ids that no other seed gives."""
    chance = random.Random(seed)
    return [chance.randrange(3, VOCABULARY) for _ in range(length)]
