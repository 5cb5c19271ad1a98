"""Token ids as keys: ``tokens[roi]`` in eight bytes a token.

Ids are compared exactly, across integer dtypes and devices: no float, no
tolerance.
"""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Sequence

import torch

from asynckv.abc import Match, TokenIds

__all__ = (
    "MAX_ID_LENGTH",
    "TOKEN_NBYTES",
    "Query",
    "as_mask",
    "as_tokens",
    "key_of",
    "make_query",
)

TOKEN_NBYTES = 8

MAX_ID_LENGTH = 256
"""An entry_id of more characters could not be told to a peer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Query:
    """What a ``drop_select`` asks for. ``key`` is ``None`` for "any entry"."""

    key: bytes | None
    entry_id: str | None = None
    match: Match = "prefix"
    min_matched_tokens: int = 1


def as_tokens(input_tokens: TokenIds | None) -> torch.Tensor | None:
    """Return token ids as a 1-d integer tensor on the CPU.

    :raises ValueError: if they have more than one dimension or are no integers
    """
    if input_tokens is None:
        return None
    if isinstance(input_tokens, torch.Tensor):
        tokens = input_tokens.detach().cpu()
    else:
        tokens = _tensor_of(input_tokens, "input_tokens")
    if tokens.dtype.is_floating_point or tokens.dtype.is_complex:
        raise ValueError(f"token ids are integers, not {tokens.dtype}")
    if tokens.dtype is torch.bool or tokens.dtype is torch.uint64:
        raise ValueError(f"token ids fit in int64; {tokens.dtype} does not")
    return _one_dimensional(tokens, "input_tokens")


def as_mask(roi: TokenIds | None, tokens: torch.Tensor | None) -> torch.Tensor | None:
    """Return the region of interest as a 1-d tensor of the tokens' length.

    :raises ValueError: if there are no tokens, the lengths differ, or it holds
        anything but 0 and 1
    """
    if roi is None:
        return None
    if tokens is None:
        raise ValueError("a roi without input_tokens selects nothing; pass both")
    mask = roi.detach().cpu() if isinstance(roi, torch.Tensor) else None
    mask = _one_dimensional(_tensor_of(roi, "roi") if mask is None else mask, "roi")
    if len(mask) != len(tokens):
        raise ValueError(f"roi has {len(mask)} places for {len(tokens)} tokens")
    if mask.dtype.is_floating_point:
        mask_values = mask.to(torch.float64)
    else:
        mask_values = mask
    if not bool(((mask_values == 0) | (mask_values == 1)).all()):
        raise ValueError("a roi holds nothing but 0 and 1: it says which tokens count")
    return mask


def key_of(tokens: torch.Tensor | None, mask: torch.Tensor | None) -> bytes:
    """Return ``tokens[mask]`` as little-endian int64."""
    if tokens is None:
        return b""
    selected = tokens if mask is None else tokens[mask.bool()]
    return selected.to(torch.int64).numpy().tobytes()


def make_query(
    input_tokens: TokenIds | None,
    roi: TokenIds | None,
    *,
    entry_id: str | None = None,
    match: Match = "prefix",
    min_matched_tokens: int = 1,
) -> Query:
    """Check what a caller asks for.

    :raises ValueError: see :func:`as_tokens` and :func:`as_mask`; also if
        ``match`` is unknown, ``min_matched_tokens`` is below 1, or no token is
        selected (nothing could ever match)
    """
    if match not in ("prefix", "exact"):
        raise ValueError(f"match is 'prefix' or 'exact', not {match!r}")
    if not 1 <= min_matched_tokens <= 2**31:
        raise ValueError("min_matched_tokens is at least 1, and at most 2**31")
    if entry_id is not None and len(entry_id) > MAX_ID_LENGTH:
        raise ValueError(f"an entry_id has at most {MAX_ID_LENGTH} characters")
    key: bytes | None
    if roi is None and type(input_tokens) is list:
        key = _key_of_ids(input_tokens)
    else:
        tokens = as_tokens(input_tokens)
        mask = as_mask(roi, tokens)
        key = None if tokens is None else key_of(tokens, mask)
    if key == b"":
        if entry_id is None:
            raise ValueError("no token is selected, so nothing could ever match")
        key = None
    return Query(key, entry_id, match, min_matched_tokens)


def _key_of_ids(ids: list[int]) -> bytes:
    """As :func:`key_of` for plain ids, without a tensor in between."""
    try:
        return array.array("q", ids).tobytes()
    except (TypeError, OverflowError) as exc:
        raise ValueError(f"input_tokens is no list of token ids: {exc}") from exc


def _tensor_of(values: Sequence[int] | torch.Tensor, name: str) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as exc:
        raise ValueError(f"{name} is no list of numbers: {exc}") from exc
    return tensor.to(torch.int64) if tensor.numel() == 0 else tensor


def _one_dimensional(tensor: torch.Tensor, name: str) -> torch.Tensor:
    if tensor.dim() != 1:
        raise ValueError(
            f"{name} has {tensor.dim()} dimensions; pass the ids of one sequence"
        )
    return tensor
