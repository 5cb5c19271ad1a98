"""What the tensors of an entry are, and what they are called.

``key``, ``LAYER.key``, ``extras.NAME``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from asynckv.abc import KVSource, KVTensors
from asynckv.tensors.blocks import KVMemory
from asynckv.transfers.queries import as_text

__all__ = ("check_names", "flatten", "unflatten")


_WHOLE = ("key", "value", "hidden")
_EXTRAS = "extras."
_MAX_TENSORS = 16384


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
    whole: set[str] = set()
    layered: set[str] = set()
    for count, name in enumerate(names, 1):
        if count > _MAX_TENSORS:
            raise ValueError(f"an entry has at most {_MAX_TENSORS} tensors")
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
