from __future__ import annotations

import pytest
import torch

from asynckv.integrations.transformers import (
    from_blocks,
    swap_heads_and_tokens,
    to_blocks,
)

STATES = torch.arange(2 * 7 * 3).reshape(2, 7, 3).float()


def test_heads_and_tokens_change_places_without_a_copy() -> None:
    swapped = swap_heads_and_tokens(STATES)
    assert swapped.shape == (7, 2, 3)
    assert swapped.data_ptr() == STATES.data_ptr()
    assert torch.equal(swap_heads_and_tokens(swapped), STATES)


def test_blocks_hold_the_tokens_in_order_and_zeros_at_the_end() -> None:
    blocks = to_blocks(STATES, 4)
    assert blocks.shape == (2, 2, 4, 3)
    assert torch.equal(blocks[0], STATES[:, :4])
    assert torch.equal(blocks[1, :, :3], STATES[:, 4:])
    assert not blocks[1, :, 3].any()


@pytest.mark.parametrize("block_size", [1, 3, 7, 16])
def test_blocks_are_put_together_again(block_size: int) -> None:
    assert torch.equal(from_blocks(to_blocks(STATES, block_size), 7), STATES)


def test_blocks_that_hold_too_little_are_refused() -> None:
    with pytest.raises(ValueError, match="2 blocks of 4"):
        from_blocks(to_blocks(STATES, 4), 9)
