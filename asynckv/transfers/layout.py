"""What the tensors of an entry are, and what they are called.

``key``, ``LAYER.key``, ``extras.NAME``. One model's entries often have one layout, so
the last few that were made here, or read and checked, are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Final

import msgspec
import torch

from asynckv.abc import KVSource, KVTensors
from asynckv.protocol.values import MAX_TENSORS, NamedSpecs
from asynckv.tensors.blocks import KVMemory
from asynckv.tensors.views import MISSING_DTYPES, dtype_of
from asynckv.transfers.tokens import as_text
from asynckv.types import TensorSpec

__all__ = (
    "Layout",
    "check_dtypes",
    "check_names",
    "flatten",
    "layout_of",
    "names_in",
    "read_layout",
    "unflatten",
)

_NAMES_SHOWN: Final = 16

_KEPT_TENSORS: Final = 512
"""Layouts of more tensors are made anew each time."""

_KEPT_LAYOUTS: Final = 16
"""Of those made here: of 512 tensors each they take some 4 MiB, with usual names."""

_SHORT_NBYTES, _LONG_NBYTES = 512, 16 * 1024
"""Peers choose what is kept: 64 short layouts and four long ones.

They are 96 KiB as encoded; the objects made of them take up to some 2 MiB.
"""

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder[NamedSpecs](NamedSpecs).decode


class Layout(msgspec.Struct, frozen=True):
    """Names, shapes and dtypes of an entry's tensors. Shared: nothing changes it."""

    specs: Mapping[str, TensorSpec]
    sizes: tuple[int, ...]
    nbytes: int
    """Bytes of the tensors, without tokens and roi."""
    encoded: bytes
    """As a peer is told it."""
    by_name: tuple[int, ...]
    """The order that no order of arguments changes: what is hashed."""
    encoded_by_name: bytes


def layout_of(specs: Mapping[str, TensorSpec]) -> Layout:
    """Return the layout of these tensors, whose names were checked."""
    named = tuple(specs.items())
    return _kept_layout(named) if len(named) <= _KEPT_TENSORS else _make_layout(named)


def read_layout(encoded: bytes) -> Layout:
    """Read what a peer says of an entry's tensors, and check all of it.

    :raises msgspec.MsgspecError: it is none, or too long
    :raises ValueError: a name, a dtype or a shape is none, or a name comes twice
    """
    if len(encoded) <= _SHORT_NBYTES:
        return _read_short(encoded)
    return (_read_long if len(encoded) <= _LONG_NBYTES else _read)(encoded)


def _make_layout(named: NamedSpecs) -> Layout:
    specs = dict(named)
    sizes = tuple(spec.nbytes for spec in specs.values())
    by_name = sorted(range(len(named)), key=lambda place: named[place][0])
    return Layout(
        MappingProxyType(specs),
        sizes,
        sum(sizes),
        encoded=_encode(named),
        by_name=tuple(by_name),
        encoded_by_name=_encode([named[place] for place in by_name]),
    )


def _read(encoded: bytes) -> Layout:
    named = _decode(encoded)
    if len(dict(named)) != len(named):
        raise ValueError("it names a tensor twice")
    _check_names([name for name, _ in named])
    check_dtypes(spec for _, spec in named)
    return _make_layout(named)


# What raises is not kept, and raises each time.
_kept_layout = lru_cache(maxsize=_KEPT_LAYOUTS)(_make_layout)
_read_short = lru_cache(maxsize=64)(_read)
_read_long = lru_cache(maxsize=4)(_read)


def check_dtypes(specs: Iterable[TensorSpec]) -> None:
    """Refuse what this process's torch has no dtype for.

    :raises ValueError: there is one
    """
    if MISSING_DTYPES:
        for spec in specs:
            dtype_of(spec.dtype)


_WHOLE = ("key", "value", "hidden")
_EXTRAS = "extras."


def flatten(
    key: KVSource,
    value: KVSource,
    hidden: KVMemory | None,
    extras: Mapping[str, KVMemory] | None,
) -> dict[str, KVMemory]:
    """Name every tensor of an entry.

    :raises TypeError: if one of them is no tensor, or a layer's name no text
    :raises ValueError: if a layer's name makes its tensors ambiguous
    """
    named: dict[str, KVMemory] = {}
    for field, tensors in (("key", key), ("value", value)):
        if isinstance(tensors, Mapping):
            for layer in tensors:
                _check_layer(layer)
            named.update({f"{layer}.{field}": t for layer, t in tensors.items()})
        elif tensors is not None:
            named[field] = tensors
    if hidden is not None:
        named["hidden"] = hidden
    if extras is not None:
        if not isinstance(extras, Mapping):
            raise TypeError(
                f"extras maps names to tensors; it is a {type(extras).__name__}"
            )
        for name, tensor in extras.items():
            named[_EXTRAS + as_text(name, "an extra's name")] = tensor
    for name, tensor in named.items():
        if not isinstance(tensor, KVMemory):
            raise TypeError(
                f"{name} is a {type(tensor).__name__}, not a tensor: pass a torch "
                "tensor or KVBlocks; layers as {name: tensor}"
            )
    check_names(named)
    return named


def check_names(names: Iterable[str]) -> None:
    """Refuse names that no entry can have.

    :raises TypeError: one is no str
    :raises ValueError: UTF-8 has no bytes for one, or it is none of ``key``,
        ``value``, ``hidden``, ``LAYER.key``, ``LAYER.value``, ``extras.NAME``, or
        both a whole tensor and a layer's are named
    """
    some = tuple(names)
    (_check_kept if len(some) <= _KEPT_TENSORS else _check_names)(some)


def _check_names(names: Sequence[str]) -> None:
    if len(names) > MAX_TENSORS:
        raise ValueError(f"an entry has at most {MAX_TENSORS} tensors")
    whole: set[str] = set()
    layered: set[str] = set()
    for name in names:
        if name in _WHOLE:
            whole.add(name)
            continue
        name = as_text(name, "a tensor's name")
        if len(name) > 512:
            raise ValueError(f"the name {name[:40]!r}... is longer than 512 characters")
        if name.startswith(_EXTRAS):
            continue
        layer, _, field = name.rpartition(".")
        if not layer or field not in ("key", "value"):
            raise ValueError(
                f"{name!r} is no tensor's name; write key, value, hidden, "
                "LAYER.key, LAYER.value or extras.NAME"
            )
        layered.add(field)
    if both := whole & layered:
        raise ValueError(f"{min(both)} is either one tensor or one a layer, not both")


_check_kept = lru_cache(maxsize=_KEPT_LAYOUTS)(_check_names)


def unflatten(
    named: Iterable[tuple[str, torch.Tensor]],
) -> tuple[KVTensors, KVTensors, torch.Tensor | None, dict[str, torch.Tensor]]:
    """Put named tensors back in their fields: key, value, hidden, extras."""
    key = value = hidden = None
    keys: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    extras: dict[str, torch.Tensor] = {}
    for name, tensor in named:
        if name == "key":
            key = tensor
        elif name == "value":
            value = tensor
        elif name == "hidden":
            hidden = tensor
        elif name.startswith(_EXTRAS):
            extras[name.removeprefix(_EXTRAS)] = tensor
        elif name.endswith(".key"):
            keys[name.removesuffix(".key")] = tensor
        elif name.endswith(".value"):
            values[name.removesuffix(".value")] = tensor
    return keys or key, values or value, hidden, extras


def _check_layer(layer: object) -> None:
    if not isinstance(layer, str):
        raise TypeError(f"a layer's name is text, not {layer!r}: write {str(layer)!r}")
    if f"{layer}.".startswith(_EXTRAS):
        raise ValueError(f"a layer called {layer!r} cannot be told from the extras")


def names_in(names: Collection[str]) -> str:
    """Return the first names for a message, and how many there are beside them."""
    first, rest = list(names)[:_NAMES_SHOWN], len(names) - _NAMES_SHOWN
    return ", ".join(first) + (f" and {rest:,} more" if rest > 0 else "")
