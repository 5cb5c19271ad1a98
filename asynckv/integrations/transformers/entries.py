"""A cache as one entry, with what it carries so that no forward is needed first."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Final, Literal, TypeAlias, get_args

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from asynckv.abc import KVEntry, KVLookupBuffer
from asynckv.errors import ConfigError
from asynckv.integrations.transformers.fingerprint import (
    fingerprint_of,
    pack_fingerprint,
)
from asynckv.integrations.transformers.layers import (
    LayerPlan,
    check_cache,
    plan_layers,
    text_config,
)
from asynckv.integrations.transformers.prompts import Prompt, pad_token_of
from asynckv.types import TensorSpec

__all__ = (
    "DEFAULT_CARRY",
    "FINGERPRINT",
    "FIRST_TOKEN",
    "HIDDEN",
    "LOGITS",
    "Carried",
    "Carry",
    "entry_of",
    "export",
)


Carry: TypeAlias = Literal["first_token", "logits", "hidden"]

FINGERPRINT: Final = "extras.fingerprint"
FIRST_TOKEN: Final = "extras.first_token"
LOGITS: Final = "extras.logits"
HIDDEN: Final = "hidden"

DEFAULT_CARRY: Final[frozenset[Carry]] = frozenset({"first_token"})


@dataclasses.dataclass(frozen=True, eq=False)
class Carried:
    """What the prefill's last position gave: next tokens, logits, hidden state.

    ``first_token`` is ``[batch]``, ``logits`` ``[batch, vocabulary]`` in float32
    and ``hidden`` ``[batch, 1, hidden_size]``.
    """

    first_token: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden: torch.Tensor | None = None

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """What there is, by the name it travels under."""
        named = {
            FIRST_TOKEN: self.first_token,
            LOGITS: self.logits,
            HIDDEN: self.hidden,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @classmethod
    def of(
        cls, logits: torch.Tensor, hidden: torch.Tensor | None, carry: Collection[Carry]
    ) -> Carried:
        """Choose greedily from the last position's ``logits``, as ``generate`` does."""
        logits = logits.detach().to("cpu", torch.float32)
        return cls(
            logits.argmax(-1) if "first_token" in carry else None,
            logits if "logits" in carry else None,
            None if hidden is None else hidden.detach().cpu(),
        )

    @staticmethod
    def specs(
        model: PreTrainedModel, batch: int, carry: Collection[Carry]
    ) -> dict[str, TensorSpec]:
        """Declare, before the forward, what it will add.

        :raises TypeError: if ``carry`` is no collection of names
        :raises ValueError: if ``carry`` names anything else
        :raises ConfigError: if the model has no language model head
        """
        if isinstance(carry, str) or not isinstance(carry, Collection):
            raise TypeError(
                f"carry is a collection of names, not {carry!r:.40}: "
                "write {'first_token', 'logits'}"
            )
        if unknown := [name for name in carry if name not in get_args(Carry)]:
            raise ValueError(
                f"carry is of {', '.join(get_args(Carry))}, not {unknown!r:.80}"
            )
        head = model.get_output_embeddings()
        if head is None:
            raise ConfigError(f"{type(model).__name__} has no language model head")
        specs = {}
        if "first_token" in carry:
            specs[FIRST_TOKEN] = TensorSpec((batch,), "int64")
        if "logits" in carry:
            vocabulary = int(head.weight.shape[0])
            specs[LOGITS] = TensorSpec((batch, vocabulary), "float32")
        if "hidden" in carry:
            size = int(text_config(model.config).hidden_size)
            specs[HIDDEN] = TensorSpec((batch, 1, size), str(model.dtype))
        return specs


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
    prompt = Prompt.of(input_ids, attention_mask, pad_token_of(model))
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
