"""An entry in a file of its own: safetensors, nothing is unpickled.

These read and write files: from async code, call them in a thread.
"""

from __future__ import annotations

import os

import torch
from safetensors.torch import load_file, save_file

from asynckv.abc import KVEntry
from asynckv.integrations.transformers.carried import HIDDEN
from asynckv.integrations.transformers.consumer import tensors_of

__all__ = ("load_entry", "save_entry")

_TOKENS = "tokens"
_ROI = "roi"


def save_entry(entry: KVEntry, path: str | os.PathLike[str]) -> None:
    """Write ``entry`` to ``path``, whole or not at all. Blocks."""
    tensors = tensors_of(entry)
    for name, tensor in ((_TOKENS, entry.input_tokens), (_ROI, entry.roi)):
        if tensor is not None:
            tensors[name] = tensor
    partial = f"{os.fspath(path)}.partial"
    save_file({name: t.contiguous() for name, t in tensors.items()}, partial)
    os.replace(partial, path)


def load_entry(path: str | os.PathLike[str]) -> KVEntry:
    """Read what :func:`save_entry` wrote. Blocks.

    :raises OSError: if there is no such file
    :raises ValueError: if it holds no entry
    """
    tensors = load_file(os.fspath(path))
    tokens, roi = tensors.pop(_TOKENS, None), tensors.pop(_ROI, None)
    parts: dict[str, dict[str, torch.Tensor]] = {"key": {}, "value": {}}
    extras, hidden = {}, tensors.pop(HIDDEN, None)
    for name, tensor in tensors.items():
        layer, _, what = name.rpartition(".")
        if layer == "extras":
            extras[what] = tensor
        elif layer and what in parts:
            parts[what][layer] = tensor
        else:
            raise ValueError(f"{path} holds no entry: {name!r} is none of its names")
    return KVEntry(tokens, roi, parts["key"], parts["value"], hidden, extras)
