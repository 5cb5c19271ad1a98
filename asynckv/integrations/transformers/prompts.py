"""The prompt of one entry: its ids, its padding, and the tokens it is found by.

A single prompt without padding is found by its plain ids, so prefixes match.
Anything else is one entry for the whole batch, found by equality only: its
tokens are ``-batch``, then ``-1 - padding`` of each row, then all rows one
after the other. Ids are never negative, so the two can never match each other,
and neither can two batches that differ in shape or padding only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from asynckv.abc import Match

__all__ = ("Prompt", "pad_token_of")


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    """Token ids ``[batch, length]`` and how many of each row are left padding."""

    ids: torch.Tensor
    padding: tuple[int, ...]

    @classmethod
    def of(
        cls,
        input_ids: torch.Tensor | Sequence[int],
        attention_mask: torch.Tensor | None = None,
        pad_token: int = -1,
    ) -> Prompt:
        """Accept what ``generate`` accepts, on any device; one row may be flat.

        Without a mask what a row begins with of ``pad_token`` is padding.

        :raises ValueError: no ids or negative ones, or a mask that does not fit
            them or is anything but left padding
        :raises TypeError: a text, a tokenizer's whole output, or no whole numbers
        """
        try:
            given = torch.as_tensor(input_ids)
        except (TypeError, ValueError, RuntimeError) as exc:
            raise TypeError(
                f"input_ids are token ids, a tokenizer's ['input_ids'], and not a "
                f"{type(input_ids).__name__}: {exc}"
            ) from exc
        ids = given.detach().to("cpu", torch.int64)
        ids = ids.unsqueeze(0) if ids.dim() == 1 else ids
        if ids.dim() != 2 or ids.numel() == 0:
            raise ValueError(f"input_ids of shape {tuple(ids.shape)} are no prompt")
        if given.is_floating_point() or given.is_complex():
            raise TypeError(f"input_ids are whole numbers, not {given.dtype}")
        if bool((ids < 0).any()):
            raise ValueError("token ids are never negative")
        if attention_mask is None:
            attention_mask = (ids != pad_token).long().cummax(-1).values
        return cls(ids, _left_padding(attention_mask, ids))

    @classmethod
    def of_tokens(cls, tokens: torch.Tensor) -> Prompt:
        """Read :attr:`tokens` back.

        :raises ValueError: if they are no prompt's tokens
        """
        tokens = tokens.detach().to("cpu", torch.int64)
        if tokens.numel() == 0 or int(tokens[0]) >= 0:
            return cls.of(tokens)
        batch = -int(tokens[0])
        if (tokens.numel() - 1) % batch or tokens.numel() <= 1 + batch:
            raise ValueError(f"{tokens.numel()} tokens are no batch of {batch} rows")
        padding = tuple(-1 - int(header) for header in tokens[1 : 1 + batch])
        ids = tokens[1 + batch :].reshape(batch, -1)
        if any(not 0 <= pad < ids.shape[1] for pad in padding):
            raise ValueError("a row of the batch has no tokens")
        return cls(cls.of(ids).ids, padding)

    @property
    def batch(self) -> int:
        return self.ids.shape[0]

    @property
    def length(self) -> int:
        """Positions of a row, padding included."""
        return self.ids.shape[1]

    @property
    def is_plain(self) -> bool:
        """One row without padding: prefixes of it mean something."""
        return self.batch == 1 and not self.is_padded

    @property
    def is_padded(self) -> bool:
        return any(self.padding)

    @property
    def match(self) -> Match:
        return "prefix" if self.is_plain else "exact"

    @property
    def tokens(self) -> torch.Tensor:
        """What the entry is inserted and selected under (all of it, no roi)."""
        if self.is_plain:
            return self.ids[0]
        header = [-self.batch, *(-1 - padding for padding in self.padding)]
        return torch.cat([torch.tensor(header), self.ids.flatten()])

    @property
    def attention_mask(self) -> torch.Tensor:
        """1 for a token, 0 for padding, ``[batch, length]``."""
        positions = torch.arange(self.length)
        return (positions >= torch.tensor(self.padding).unsqueeze(1)).long()

    @property
    def position_ids(self) -> torch.Tensor:
        """As ``generate`` counts them: each row's first token is 0, padding too."""
        mask = self.attention_mask
        return (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)

    def shared_length(self, other: Prompt) -> int:
        """How many positions of a row both have; 0 if one contradicts the other."""
        length = min(self.length, other.length)
        if self.padding != other.padding:
            return 0
        if not (self.is_plain or self.length == other.length):
            return 0
        same = torch.equal(self.ids[:, :length], other.ids[:, :length])
        return length if same else 0


def pad_token_of(model: PreTrainedModel) -> int:
    """Return what is padding where no mask is given, as to ``generate``: -1, nothing.

    One that may end a row is a token like others.
    """
    config = getattr(model, "generation_config", None)
    pad, ends = (getattr(config, f"{what}_token_id", None) for what in ("pad", "eos"))
    is_end = pad in (ends if isinstance(ends, list) else [ends])
    return -1 if pad is None or is_end else pad


def _left_padding(attention_mask: torch.Tensor, ids: torch.Tensor) -> tuple[int, ...]:
    mask = attention_mask.detach().to("cpu", torch.int64)
    mask = mask.unsqueeze(0) if mask.dim() == 1 else mask
    if mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask {tuple(mask.shape)} for input_ids {tuple(ids.shape)}"
        )
    padding = tuple(int(zeros) for zeros in (mask == 0).sum(-1))
    if not torch.equal(mask, Prompt(ids, padding).attention_mask):
        raise ValueError("attention_mask must be left padding: zeros, then ones")
    if any(pad == ids.shape[1] for pad in padding):
        raise ValueError("a row of the batch has no tokens")
    return padding
