"""What callers pass, checked where they say it: alike for local and remote buffers.

Rule of this file: what it returns can be sent to a peer, which would refuse anything
else as a breach of the protocol, and so end the link for everybody.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping

import torch

from asynckv.types import TensorSpec

__all__ = (
    "MAX_ID_LENGTH",
    "as_count",
    "as_entry_id",
    "as_key",
    "as_keys",
    "as_seconds",
    "as_specs",
    "as_text",
)

MAX_ID_LENGTH = 256
"""An entry_id of more characters could not be told to a peer."""

_MAX_KEY_LENGTH = 512
_MAX_COUNT = 2**31


def as_count(value: object, name: str) -> int:
    """Return a number from 1 on, of any type of whole numbers but ``bool``.

    :raises TypeError: it is no whole number
    :raises ValueError: it is below 1, or above 2**31
    """
    if type(value) is not int:
        value = _whole(value, name)
    if not 1 <= value <= _MAX_COUNT:
        raise ValueError(f"{name} is at least 1, and at most 2**31")
    return value


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


def as_seconds(value: object, name: str) -> float | None:
    """Return a time, ``None`` for no end.

    :raises TypeError: it is no number
    :raises ValueError: it is negative, or not finite
    """
    if value is None or (type(value) is float and 0 <= value < math.inf):
        return value
    if isinstance(value, bool | str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} is a number of seconds, not {value!r:.40}")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    except (TypeError, ValueError, RuntimeError) as exc:
        raise TypeError(f"{name} is a number of seconds, not {value!r:.40}") from exc
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{name} is finite and not negative; None means no end")
    return seconds


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
    if isinstance(values, str) or not isinstance(values, Iterable):
        what = "one key" if isinstance(values, str) else type(values).__name__
        raise TypeError(f"this takes a sequence of keys, not {what}")
    return tuple(as_key(value) for value in values)


def _whole(value: object, name: str) -> int:
    is_bool = isinstance(value, bool) or getattr(value, "dtype", None) is torch.bool
    if not is_bool and hasattr(value, "__index__"):
        try:
            return operator.index(value)
        except (TypeError, RuntimeError):  # a tensor of several, or of none here
            pass
    raise TypeError(f"{name} is a whole number, not {value!r:.40}")
