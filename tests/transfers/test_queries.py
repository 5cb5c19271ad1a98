from __future__ import annotations

import struct

import pytest
import torch

from asynckv.transfers.queries import (
    Query,
    as_mask,
    as_seconds,
    as_tokens,
    key_of,
    make_query,
)

INTEGERS = ("uint8", "int8", "int16", "uint16", "int32", "uint32", "int64")
MASKS = (*INTEGERS, "bool", "float32", "bfloat16", "float8_e4m3fn", "complex64")


def packed(*tokens: int) -> bytes:
    return struct.pack(f"<{len(tokens)}q", *tokens)


@pytest.mark.parametrize("name", INTEGERS)
def test_ids_of_every_integer_dtype_give_the_same_key(name: str) -> None:
    tokens = as_tokens(torch.tensor([1, 2, 100]).to(getattr(torch, name)))
    mask = as_mask([1, 0, 1], tokens)
    assert key_of(tokens, mask) == packed(1, 100)


def test_without_a_mask_every_id_counts() -> None:
    for dtype in (torch.int64, torch.int32):
        assert key_of(as_tokens(torch.tensor([1, 2], dtype=dtype)), None) == packed(
            1, 2
        )


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_may_be_of_any_dtype(name: str) -> None:
    tokens = as_tokens([5, 6, 7])
    mask = torch.tensor([0, 1, 1]).to(getattr(torch, name))
    assert key_of(tokens, as_mask(mask, tokens)) == packed(6, 7)


@pytest.mark.parametrize(
    "mask", [[0, 2], [0, -1], [0.5, 1], [float("nan"), 1], [1j, 1], [1], [[1, 0]], "ab"]
)
def test_a_mask_that_is_none_is_refused(mask: list[int]) -> None:
    with pytest.raises(ValueError, match="roi"):
        as_mask(mask, as_tokens([1, 2]))


@pytest.mark.parametrize(
    "tokens", [[1.5], [[1]], [2**63], ["a"], [True], 7, torch.tensor([1.0])]
)
def test_tokens_that_are_none_are_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="token"):
        as_tokens(tokens)


def test_a_roi_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="pass both"):
        make_query(None, [1])


def test_nothing_selected_could_never_match() -> None:
    for tokens, roi in (([], None), ([1], [0])):
        with pytest.raises(ValueError, match="nothing could ever match"):
            make_query(tokens, roi)
    assert make_query([], None, entry_id="a") == Query(None, "a")


def test_other_options_are_checked() -> None:
    with pytest.raises(ValueError, match="match is"):
        make_query([1], None, match="longest")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1"):
        make_query([1], None, min_matched_tokens=0)


def test_strides_and_gradients_do_not_matter() -> None:
    tokens = as_tokens(torch.arange(6)[::2])
    assert key_of(tokens, None) == packed(0, 2, 4)


def test_what_cannot_tell_how_many_seconds_it_is_is_no_time() -> None:
    class Late:
        def __float__(self) -> float:
            raise RuntimeError("not yet")

    with pytest.raises(TypeError, match="is a number of seconds"):
        as_seconds(Late(), "ttl_s")
