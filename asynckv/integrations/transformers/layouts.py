"""Between transformers' layout of a layer and those of paged engines.

transformers keeps ``[batch, heads, tokens, dim]``: HND with a batch in front.
"""

from __future__ import annotations

import torch

__all__ = ("from_blocks", "swap_heads_and_tokens", "to_blocks")


def swap_heads_and_tokens(states: torch.Tensor) -> torch.Tensor:
    """Turn HND into NHD, or NHD into HND: a view; batch dimensions stay in front."""
    return states.transpose(-3, -2)


def to_blocks(states: torch.Tensor, block_size: int) -> torch.Tensor:
    """Cut ``[heads, tokens, dim]`` into ``[blocks, heads, block_size, dim]``.

    The last block is filled up with zeros.
    """
    heads, tokens, dim = states.shape
    blocks = -(-tokens // block_size)
    padded = states.new_zeros(heads, blocks * block_size, dim)
    padded[:, :tokens] = states
    return padded.reshape(heads, blocks, block_size, dim).transpose(0, 1).contiguous()


def from_blocks(blocks: torch.Tensor, tokens: int) -> torch.Tensor:
    """Put ``[blocks, heads, block_size, dim]`` together again: the first ``tokens``.

    :raises ValueError: if the blocks hold fewer
    """
    count, heads, block_size, dim = blocks.shape
    if tokens > count * block_size:
        raise ValueError(f"{count} blocks of {block_size} hold no {tokens} tokens")
    joined = blocks.transpose(0, 1).reshape(heads, count * block_size, dim)
    return joined[:, :tokens].contiguous()
