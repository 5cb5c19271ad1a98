"""Prefill here, decode there, with the models of Hugging Face transformers.

``prefill`` computes a prompt and inserts it layer by layer; ``generate_from``
selects it elsewhere and generates on, with the tokens of a single process. What
``generate`` does wrongly from any cache (with an ``assistant_model``), it refuses.
``store_prefix`` and ``load_prefix`` keep the KV of prompts in a store, for others that
begin alike.
"""

from __future__ import annotations

from asynckv.integrations.transformers.consumer import (
    Load,
    handoff_of,
    load,
    load_entry,
    save_entry,
)
from asynckv.integrations.transformers.entries import Carried, Carry, entry_of, export
from asynckv.integrations.transformers.fingerprint import fingerprint_of
from asynckv.integrations.transformers.generate import (
    Generated,
    continue_from,
    generate_from,
)
from asynckv.integrations.transformers.handoff import (
    GenerateKwargs,
    Handoff,
    ReceivingCache,
)
from asynckv.integrations.transformers.layers import (
    LayerEvent,
    LayerObserver,
    LayerPlan,
    from_blocks,
    plan_layers,
    swap_heads_and_tokens,
    to_blocks,
)
from asynckv.integrations.transformers.prefixes import load_prefix, store_prefix
from asynckv.integrations.transformers.producer import (
    Prefilled,
    StreamingCache,
    prefill,
)
from asynckv.integrations.transformers.prompts import Prompt

__all__ = (
    "Carried",
    "Carry",
    "GenerateKwargs",
    "Generated",
    "Handoff",
    "LayerEvent",
    "LayerObserver",
    "LayerPlan",
    "Load",
    "Prefilled",
    "Prompt",
    "ReceivingCache",
    "StreamingCache",
    "continue_from",
    "entry_of",
    "export",
    "fingerprint_of",
    "from_blocks",
    "generate_from",
    "handoff_of",
    "load",
    "load_entry",
    "load_prefix",
    "plan_layers",
    "prefill",
    "save_entry",
    "store_prefix",
    "swap_heads_and_tokens",
    "to_blocks",
)
