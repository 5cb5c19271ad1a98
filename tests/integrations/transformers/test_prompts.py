from __future__ import annotations

import pytest
import torch

from asynckv.integrations.transformers import Prompt

IDS = torch.arange(1, 11).reshape(2, 5)
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


def test_one_row_is_found_by_its_ids() -> None:
    prompt = Prompt.of([5, 6, 7])
    assert prompt.tokens.tolist() == [5, 6, 7]
    assert prompt.match == "prefix"


def test_a_batch_is_found_as_a_whole() -> None:
    prompt = Prompt.of(IDS, MASK)
    assert prompt.tokens.tolist() == [-2, -3, -1, *range(1, 11)]
    assert prompt.match == "exact"


def test_a_mask_of_ones_is_no_padding() -> None:
    prompt = Prompt.of(IDS[:1], torch.ones(1, 5))
    assert prompt.is_plain
    assert prompt.tokens.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("mask", [None, MASK])
def test_tokens_are_read_back(mask: torch.Tensor | None) -> None:
    back = Prompt.of_tokens(Prompt.of(IDS, mask).tokens)
    assert torch.equal(back.ids, IDS)
    assert back.padding == ((0, 0) if mask is None else (2, 0))
    assert torch.equal(
        back.attention_mask, torch.ones_like(IDS) if mask is None else MASK
    )


def test_batches_that_differ_in_padding_only_never_match() -> None:
    others = [
        Prompt.of(IDS),
        Prompt.of(IDS.reshape(1, 10)),
        Prompt.of(IDS.reshape(5, 2)),
    ]
    tokens = {tuple(prompt.tokens.tolist()) for prompt in others}
    assert tuple(Prompt.of(IDS, MASK).tokens.tolist()) not in tokens
    assert len(tokens) == 3
    assert all(Prompt.of(IDS, MASK).shared_length(other) == 0 for other in others)


def test_positions_are_counted_from_the_first_token_of_a_row() -> None:
    positions = Prompt.of(IDS, MASK).position_ids
    assert positions.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]


def test_the_shared_length_is_that_of_the_shorter_unless_they_differ() -> None:
    prompt = Prompt.of([1, 2, 3, 4])
    assert prompt.shared_length(Prompt.of([1, 2])) == 2
    assert prompt.shared_length(Prompt.of([1, 2, 3, 4, 5])) == 4
    assert prompt.shared_length(Prompt.of([1, 3])) == 0


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([], None, "no prompt"),
        (torch.zeros(1, 2, 3), None, "no prompt"),
        ([1, -1], None, "never negative"),
        (IDS, MASK[:1], "attention_mask"),
        (IDS, MASK.flip(1), "left padding"),
        (IDS, torch.tensor([[1, 0, 1, 1, 1], [1, 1, 1, 1, 1]]), "left padding"),
        (IDS, torch.tensor([[0] * 5, [1] * 5]), "no tokens"),
    ],
)
def test_what_is_no_prompt_is_refused(
    ids: torch.Tensor, mask: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Prompt.of(ids, mask)


@pytest.mark.parametrize("tokens", [[], [-2, -1, -1, 1], [-2, -1, -1], [-1, -3, 1, 2]])
def test_tokens_of_no_prompt_are_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match=r"prompt|batch|row"):
        Prompt.of_tokens(torch.tensor(tokens, dtype=torch.int64))


@pytest.mark.parametrize("tokens", [[-2, -1, -1], [-2, -1, -1, 5]])
def test_a_batch_without_tokens_for_each_row_is_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="no batch of 2 rows"):
        Prompt.of_tokens(torch.tensor(tokens))
