"""Token ids as keys: ``tokens[roi]`` in eight bytes a token.

Ids are compared exactly, across integer dtypes and devices: no float, no
tolerance.
"""

from __future__ import annotations

import array
import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeGuard

import msgspec
import numpy
import torch

from asynckv.abc import Match, TokenIds
from asynckv.tensors.views import bytes_of, check_sendable, spec_of, tensor_from
from asynckv.types import TensorSpec, as_count

__all__ = (
    "MAX_ID_LENGTH",
    "TOKEN_NBYTES",
    "Query",
    "Tokens",
    "as_entry_id",
    "as_key",
    "as_keys",
    "as_many_keys",
    "as_mask",
    "as_specs",
    "as_text",
    "as_tokens",
    "check_mask",
    "check_tokens",
    "key_of",
    "make_query",
    "tensor_of",
)


TOKEN_NBYTES = 8

_ID_DTYPES = frozenset({"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"})


class Tokens(msgspec.Struct, frozen=True, gc=False):
    """Token ids, or a roi: the bytes of a 1-d tensor, and what they are."""

    data: bytes
    spec: TensorSpec

    def __len__(self) -> int:
        return self.spec.shape[0]

    def tensor(self) -> torch.Tensor:
        """Return a tensor with memory of its own."""
        return tensor_from(self.data, self.spec)


class Query(msgspec.Struct, frozen=True, gc=False):
    """What a ``drop_select`` asks for. ``key`` is ``None`` for "any entry"."""

    key: bytes | None
    entry_id: str | None = None
    match: Match = "prefix"
    min_matched_tokens: int = 1


def as_tokens(input_tokens: TokenIds | None) -> Tokens | None:
    """Return a copy of token ids.

    :raises ValueError: if they have more than one dimension or are no integers
    """
    if input_tokens is None:
        return None
    if _are_plain_ids(input_tokens):
        return Tokens(
            _key_of_ids(input_tokens), TensorSpec((len(input_tokens),), "int64")
        )
    tokens = _copied(input_tokens, "input_tokens")
    check_tokens(tokens)
    return tokens


def check_tokens(tokens: Tokens) -> None:
    """Refuse what are no token ids.

    :raises ValueError: if they have more than one dimension or are no integers
    """
    if tokens.spec.dtype not in _ID_DTYPES:
        raise ValueError(
            f"token ids are integers that fit in int64, not {tokens.spec.dtype}"
        )
    _check_one_dimensional(tokens, "input_tokens")


def as_mask(roi: TokenIds | None, tokens: Tokens | None) -> Tokens | None:
    """Return a copy of the region of interest, which has the tokens' length.

    :raises ValueError: if there are no tokens, the lengths differ, or it holds
        anything but 0 and 1
    """
    if roi is None:
        return None
    mask = _copied(roi, "roi")
    check_mask(mask, tokens)
    return mask


def check_mask(mask: Tokens, tokens: Tokens | None) -> None:
    """Refuse what is no region of interest of ``tokens``.

    :raises ValueError: there are no tokens, the lengths differ, or it holds
        anything but 0 and 1
    """
    if tokens is None:
        raise ValueError("a roi without input_tokens selects nothing; pass both")
    _check_one_dimensional(mask, "roi")
    if len(mask) != len(tokens):
        raise ValueError(f"roi has {len(mask)} places for {len(tokens)} tokens")
    values = mask.tensor()
    if values.dtype.is_floating_point:
        values = values.to(torch.float64)
    if not bool(((values == 0) | (values == 1)).all()):
        raise ValueError("a roi holds nothing but 0 and 1: it says which tokens count")


def key_of(tokens: Tokens | None, mask: Tokens | None) -> bytes:
    """Return ``tokens[mask]`` as little-endian int64."""
    if tokens is None or not tokens.data:
        return b""
    if mask is None and tokens.spec.dtype == "int64":
        return tokens.data
    ids = numpy.frombuffer(tokens.data, tokens.spec.dtype)
    if mask is not None:
        ids = ids[mask.tensor().bool().numpy()]
    return ids.astype(numpy.int64).tobytes()


def tensor_of(tokens: Tokens | None) -> torch.Tensor | None:
    """Return what an application is handed."""
    return None if tokens is None else tokens.tensor()


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
    :raises TypeError: ``entry_id`` is no str, or ``min_matched_tokens`` no whole number
    """
    if not isinstance(match, str) or match not in ("prefix", "exact"):
        raise ValueError(f"match is 'prefix' or 'exact', not {match!r}")
    min_matched_tokens = as_count(min_matched_tokens, "min_matched_tokens")
    if entry_id is not None:
        entry_id = as_entry_id(entry_id)
    key: bytes | None
    if roi is None and _are_plain_ids(input_tokens):
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


def _are_plain_ids(values: object) -> TypeGuard[Sequence[int]]:
    """Can the short way take them? What begins with a bool is torch's to judge."""
    if type(values) is list or type(values) is tuple:
        return bool(values) and type(values[0]) is int
    return False


def _key_of_ids(ids: Sequence[int]) -> bytes:
    """As :func:`key_of` for plain ids, without a tensor in between."""
    try:
        return array.array("q", ids).tobytes()
    except (TypeError, OverflowError) as exc:
        raise ValueError(
            f"input_tokens is no list of whole numbers below 2**63: {exc}"
        ) from exc


def _copied(values: TokenIds, name: str) -> Tokens:
    tensor = (
        values if isinstance(values, torch.Tensor) else _number_tensor(values, name)
    )
    if tensor.device.type != "meta":
        tensor = tensor.detach().cpu()
    check_sendable(tensor)
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    return Tokens(bytes(bytes_of(dense)), spec_of(dense))


def _number_tensor(values: Sequence[int], name: str) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as exc:
        raise ValueError(
            f"{name} is a list, tuple, array or tensor of whole numbers, not "
            f"{values!r:.40}"
        ) from exc
    return tensor.to(torch.int64) if tensor.numel() == 0 else tensor


def _check_one_dimensional(tokens: Tokens, name: str) -> None:
    dimensions = len(tokens.spec.shape)
    if dimensions != 1:
        raise ValueError(
            f"{name} has {dimensions} dimensions; pass the ids of one sequence"
        )


MAX_ID_LENGTH = 256
"""An entry_id of more characters could not be told to a peer."""

_MAX_KEY_LENGTH = 512
_KEYS_A_TURN: Final = 1024


def as_text(value: object, name: str) -> str:
    """Return a plain ``str`` that can be sent.

    :raises TypeError: it is no ``str``
    :raises ValueError: UTF-8 has no bytes for it
    """
    if not isinstance(value, str):
        raise TypeError(f"{name} is a str, not {type(value).__name__}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as exc:
            raise ValueError(f"{name} {value[:40]!r} is not valid Unicode") from exc
    return str.__str__(value)


def as_entry_id(value: object) -> str:
    """Return the id of an entry.

    :raises TypeError: it is no ``str``
    :raises ValueError: it is longer than 256 characters, or UTF-8 has no bytes for it
    """
    entry_id = as_text(value, "an entry_id")
    if len(entry_id) > MAX_ID_LENGTH:
        raise ValueError(f"an entry_id has at most {MAX_ID_LENGTH} characters")
    return entry_id


def as_specs(specs: object) -> dict[str, TensorSpec]:
    """Return what ``open_insert`` is told of the tensors to come.

    :raises TypeError: it is no mapping of names to :class:`TensorSpec`
    :raises ValueError: UTF-8 has no bytes for a name
    """
    if not isinstance(specs, Mapping):
        raise TypeError(
            f"specs maps names to TensorSpec(shape, dtype), not {type(specs).__name__}"
        )
    for name, spec in specs.items():
        if not isinstance(spec, TensorSpec):
            raise TypeError(
                f"specs[{name!r}] is a {type(spec).__name__}: "
                "write asynckv.TensorSpec(shape, dtype)"
            )
    return {as_text(name, "a tensor's name"): spec for name, spec in specs.items()}


def as_key(value: object) -> str:
    """Return the name of a value in a store.

    :raises TypeError: it is no ``str``
    :raises ValueError: it is longer than 512 characters, or UTF-8 has no bytes for it
    """
    key = as_text(value, "a key")
    if len(key) > _MAX_KEY_LENGTH:
        raise ValueError(f"the key {key[:40]!r}... is longer than 512 characters")
    return key


def as_keys(values: object) -> tuple[str, ...]:
    """Return several keys.

    :raises TypeError: it is no sequence of ``str``, or one ``str``
    :raises ValueError: see :func:`as_key`
    """
    keys = _as_tuple(values)
    are_plain = {*map(type, keys)} <= {str} and "".join(keys).isascii()
    if are_plain and max(map(len, keys), default=0) <= _MAX_KEY_LENGTH:
        return keys  # those of a long prompt are thousands
    return tuple(as_key(key) for key in keys)


async def as_many_keys(values: object) -> tuple[str, ...]:
    """As :func:`as_keys`: while they are looked at others have their turn.

    A cancelled call leaves no trace.
    """
    given, keys = _as_tuple(values), list[str]()
    for start in range(0, len(given), _KEYS_A_TURN):
        if start:
            await asyncio.sleep(0)
        keys += as_keys(given[start : start + _KEYS_A_TURN])
    return tuple(keys)


def _as_tuple(values: object) -> tuple[Any, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        what = "one key" if isinstance(values, str) else type(values).__name__
        raise TypeError(f"this takes a sequence of keys, not {what}")
    return tuple(values)
