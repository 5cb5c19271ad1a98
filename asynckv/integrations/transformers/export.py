"""A cache that is filled already, as one entry."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from asynckv.abc import KVEntry, KVLookupBuffer
from asynckv.integrations.transformers.carried import FINGERPRINT, HIDDEN, Carried
from asynckv.integrations.transformers.fingerprint import (
    fingerprint_of,
    pack_fingerprint,
)
from asynckv.integrations.transformers.layers import (
    LayerPlan,
    check_cache,
    plan_layers,
)
from asynckv.integrations.transformers.prompts import Prompt

__all__ = ("entry_of", "export")


def entry_of(
    model: PreTrainedModel,
    cache: Cache,
    input_ids: torch.Tensor | Sequence[int],
    *,
    attention_mask: torch.Tensor | None = None,
    carried: Carried | None = None,
    name: str = "",
) -> KVEntry:
    """Describe a filled cache as an entry, without copying it.

    ``input_ids`` are the positions that the cache holds: after ``generate``,
    all but the last token. What a sliding layer has dropped cannot be brought
    back: an entry for exactly these positions then needs ``carried``.

    :raises ConfigError: naming the layer and the kind that cannot be carried
    :raises ValueError: if the cache does not hold these positions
    """
    prompt = Prompt.of(input_ids, attention_mask)
    plans = plan_layers(model.config)
    check_cache(cache, plans)
    dtype = model.dtype  # looks through all parameters: once is enough
    key, value = {}, {}
    for plan in plans:
        if plan.kind != "shared":
            keys, values = _states(cache, plan, prompt, dtype)
            key[plan.name], value[plan.name] = keys, values
    tensors = {} if carried is None else dict(carried.tensors())
    hidden = tensors.pop(HIDDEN, None)
    fingerprint = fingerprint_of(model, name=name, plans=plans)
    tensors[FINGERPRINT] = pack_fingerprint(fingerprint)
    extras = {name.removeprefix("extras."): t for name, t in tensors.items()}
    return KVEntry(prompt.tokens, None, key, value, hidden, extras)


async def export(
    model: PreTrainedModel,
    cache: Cache,
    input_ids: torch.Tensor | Sequence[int],
    lookup: KVLookupBuffer,
    *,
    attention_mask: torch.Tensor | None = None,
    carried: Carried | None = None,
    name: str = "",
    entry_id: str | None = None,
    ttl_s: float | None = 600.0,
    deliveries: int = 1,
) -> str:
    """Insert a filled cache in one piece and return the entry's id.

    As :func:`entry_of` and ``insert``: on return the cache may go on growing; a
    cancelled call is what a cancelled ``insert`` is.
    """
    entry = entry_of(
        model,
        cache,
        input_ids,
        attention_mask=attention_mask,
        carried=carried,
        name=name,
    )
    return await lookup.insert(
        entry.input_tokens,
        entry.roi,
        entry.key,
        entry.value,
        entry.hidden,
        extras=entry.extras,
        entry_id=entry_id,
        ttl_s=ttl_s,
        deliveries=deliveries,
    )


def _states(
    cache: Cache, plan: LayerPlan, prompt: Prompt, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    layer = cache.layers[plan.index]
    if not isinstance(layer, DynamicLayer):
        raise ValueError(f"layer {plan.index} of the cache is {type(layer).__name__}")
    keys, values = layer.keys, layer.values
    if keys is None or values is None:
        raise ValueError(f"layer {plan.index} of the cache is empty")
    held = layer.get_seq_length()
    if held != prompt.length:
        raise ValueError(
            f"layer {plan.index} of the cache holds {held} positions, input_ids "
            f"{prompt.length}: pass the tokens whose keys the cache holds"
        )
    rows = min(keys.shape[-2], plan.rows_to_carry(held))
    expected = plan.specs(prompt.batch, rows, dtype).values()
    states = [t[..., t.shape[-2] - rows :, :].detach().cpu() for t in (keys, values)]
    shapes = [spec.shape for spec in expected]
    if [tuple(t.shape) for t in states] != shapes or keys.dtype != dtype:
        raise ValueError(
            f"layer {plan.index} of the cache is {tuple(keys.shape)} {keys.dtype}, "
            f"this prompt and model need {shapes[0]} {dtype}"
        )
    return states[0], states[1]
