"""Keep the KV of prompts in a store, and find what a new prompt begins with.

A value is the KV of ``chunk_tokens`` tokens, all layers one behind the other; its key
stands for all tokens up to its end, and for the model.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from transformers import Cache, PreTrainedModel

from asynckv.abc import KVEntry, KVStoreBuffer
from asynckv.connectors import prefix_block_keys
from asynckv.errors import ConfigError
from asynckv.integrations.transformers.consumer import handoff_of
from asynckv.integrations.transformers.fingerprint import read_fingerprint
from asynckv.integrations.transformers.forward import in_thread
from asynckv.integrations.transformers.handoff import Handoff
from asynckv.integrations.transformers.layers import (
    LayerPlan,
    check_cache,
    check_length,
    check_placement,
    read_plans,
)
from asynckv.integrations.transformers.prompts import Prompt, pad_token_of
from asynckv.tensors.views import dtype_of, spec_of
from asynckv.types import TensorSpec

__all__ = ("load_prefix", "store_prefix")

_THREAD: Final = "asynckv prefix"


async def store_prefix(
    model: PreTrainedModel,
    input_ids: torch.Tensor | Sequence[int],
    cache: Cache,
    store: KVStoreBuffer,
    *,
    name: str = "",
    salt: str = "",
    chunk_tokens: int = 256,
    ttl_s: float | None = None,
) -> int:
    """Store what ``cache`` has of a prompt, whole chunks of it from its first token on.

    ``cache`` is what ``model`` has filled: the ``past_key_values`` that ``generate``
    returns with ``return_dict_in_generate=True``. ``input_ids`` are the tokens it is
    of, or some at its beginning. What is stored already is not stored again. ``name``
    goes into the fingerprint (see ``fingerprint_of``), ``salt`` keeps tenants apart,
    and prompts with other images.

    Returns how many of the tokens are stored now, counted from the first. The cache
    must not change meanwhile. A cancelled call has stored some chunks, from the last
    one on, which are of use once the ones before them are there.

    :raises ConfigError: a layer cannot be carried, or has dropped what was before its
        window: fill ``DynamicCache()``, made without the config, which keeps all; or
        the cache is so long that it has other KV than shorter prompts have
    :raises ValueError: several prompts at once, or one with padding, or with images and
        without ``salt``
    """
    prompt = _plain(model, input_ids, salt)
    check_length(model.config, cache.get_seq_length())
    keys, plans = await _keys_of(model, prompt, name, salt, chunk_tokens)
    check_cache(cache, tuple(plans))
    layers: list[tuple[LayerPlan, Any]] = [
        (plan, cache.layers[plan.index]) for plan in plans if plan.kind != "shared"
    ]
    rows = min(prompt.length, cache.get_seq_length())
    for plan, layer in layers:
        kept = layer.keys
        seen = max(rows, layer.get_seq_length())  # a window keeps the last of them
        if kept is None or kept.shape[0] != 1 or kept.shape[-2] < seen:
            raise ConfigError(
                f"layer {plan.index} ({plan.label}) has not kept all positions",
                hint="pass past_key_values=DynamicCache() to generate()",
            )
        specs = plan.specs(1, kept.shape[-2], model.dtype)
        if [*specs.values()] != [spec_of(kept), spec_of(layer.values)]:
            raise ConfigError(
                f"layer {plan.index} of the cache is {kept.dtype} of another shape or "
                f"dtype than the model's, {model.dtype}",
                hint="store the cache that this very model has filled",
            )
    keys = keys[: rows // chunk_tokens]
    states: list[torch.Tensor] = [
        part for _, layer in layers for part in (layer.keys, layer.values)
    ]
    there = await store.match_prefix(keys)
    for number in reversed(range(there, len(keys))):
        cut = slice(number * chunk_tokens, (number + 1) * chunk_tokens)
        value = await in_thread(functools.partial(_packed, states, cut), name=_THREAD)
        await store.put(keys[number], value, ttl_s=ttl_s)
    return len(keys) * chunk_tokens


async def load_prefix(
    model: PreTrainedModel,
    input_ids: torch.Tensor | Sequence[int],
    store: KVStoreBuffer,
    *,
    name: str = "",
    salt: str = "",
    chunk_tokens: int = 256,
    within_s: float | None = None,
) -> Handoff | None:
    """Return what a prompt begins with, as far as it is stored; ``None``: nothing is.

    ``await continue_from(handoff, ...)`` goes on from there. Waits until all of it is
    here; for what only a lower tier of the store has, for ``within_s`` at most. A
    cancelled call leaves no trace.

    :raises ConfigError: naming the layer that cannot be carried, or the devices that
        the model is spread over; or a prompt so long shares no KV with others
    :raises ValueError: several prompts at once, or one with padding, or with images and
        without ``salt``
    """
    prompt = _plain(model, input_ids, salt)
    check_placement(model)
    check_length(model.config, prompt.length)
    keys, plans = await _keys_of(model, prompt, name, salt, chunk_tokens)
    specs = _specs_of(plans, chunk_tokens, model.dtype)
    async with store.pin(keys, within_s=within_s, prefix=True) as found:
        known = keys[: (*found, False).index(False)]
        values = await store.get_many(known[::-1])  # the first one was used last then
    chunks = list(_whole(reversed(values), sum(one.nbytes for one in specs.values())))
    if not chunks:
        return None
    parts = await in_thread(lambda: _joined(chunks, specs), name=_THREAD)
    entry = KVEntry(
        input_tokens=prompt.ids[0, : len(chunks) * chunk_tokens],
        roi=None,
        key={layer: parts[f"{layer}.key"] for layer in _names(plans)},
        value={layer: parts[f"{layer}.value"] for layer in _names(plans)},
        hidden=None,
        entry_id=known[len(chunks) - 1],
    )
    return handoff_of(model, entry, prompt.ids, name=name)


def _plain(
    model: PreTrainedModel, input_ids: torch.Tensor | Sequence[int], salt: str
) -> Prompt:
    prompt = Prompt.of(input_ids, pad_token=pad_token_of(model))
    if not prompt.is_plain:
        raise ValueError(
            f"a prefix is of one prompt without padding, not of {prompt.batch} rows "
            f"padded by {max(prompt.padding)}"
        )
    for what in ("image", "video", "audio"):
        token = getattr(model.config, f"{what}_token_id", None)
        if not salt and token is not None and bool((prompt.ids == token).any()):
            raise ValueError(
                f"the prompt has {what} tokens, which are the same whatever it is: "
                "give a salt that says which, a digest of it"
            )
    return prompt


async def _keys_of(
    model: PreTrainedModel, prompt: Prompt, name: str, salt: str, chunk_tokens: int
) -> tuple[tuple[str, ...], Sequence[LayerPlan]]:
    plans = await read_plans(model.config)
    fingerprint = await read_fingerprint(model, name=name, plans=plans)
    tokens: list[int] = prompt.ids[0].tolist()
    return prefix_block_keys(tokens, chunk_tokens, fingerprint, salt), plans


def _names(plans: Sequence[LayerPlan]) -> list[str]:
    return [plan.name for plan in plans if plan.kind != "shared"]


def _specs_of(
    plans: Sequence[LayerPlan], tokens: int, dtype: torch.dtype
) -> dict[str, TensorSpec]:
    """Return what a value is made of, in this order."""
    return {
        name: spec
        for plan in plans
        for name, spec in plan.specs(1, tokens, dtype).items()
    }


def _packed(states: Iterable[torch.Tensor], cut: slice) -> torch.Tensor:
    """Return the bytes of some positions of all layers."""
    parts = [one[:, :, cut].detach().cpu() for one in states]
    return torch.cat([part.flatten().view(torch.uint8) for part in parts])


def _whole(
    values: Iterable[torch.Tensor | None], nbytes: int
) -> Iterator[torch.Tensor]:
    """Yield values up to the first that is missing, or is not of this model."""
    for value in values:
        if value is None or value.dtype != torch.uint8 or value.nbytes != nbytes:
            return
        yield value


def _joined(
    chunks: Sequence[torch.Tensor], specs: Mapping[str, TensorSpec]
) -> dict[str, torch.Tensor]:
    """Return each layer's part of all chunks in one tensor."""
    joined, start = {}, 0
    for name, spec in specs.items():
        end = start + spec.nbytes
        pieces = [
            chunk[start:end].view(dtype_of(spec.dtype)).view(spec.shape)
            for chunk in chunks
        ]
        joined[name] = torch.cat(pieces, dim=2)
        start = end
    return joined
