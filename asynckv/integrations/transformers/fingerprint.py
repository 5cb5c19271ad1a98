"""What must be equal before one model's KV means anything to another."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from asynckv.errors import IncompatiblePeer
from asynckv.integrations.transformers.layers import (
    LayerPlan,
    plan_layers,
    text_config,
)
from asynckv.types import KVFingerprint

__all__ = ("check_fingerprint", "fingerprint_of", "pack_fingerprint")


def fingerprint_of(
    model: PreTrainedModel | PreTrainedConfig,
    *,
    dtype: torch.dtype | None = None,
    name: str = "",
    tokenizer: PreTrainedTokenizerBase | str | None = None,
    plans: Sequence[LayerPlan] | None = None,
) -> KVFingerprint:
    """Fingerprint a model, for ``LookupBuffer``, ``serve`` and ``connect``.

    A config tells no weights apart: two models of one architecture need
    different ``name``. ``dtype`` is needed for a config that has none; a
    ``tokenizer`` is compared by its vocabulary, or by the text given. ``plans``
    are what ``plan_layers`` says of the config, where that is known already.

    :raises ConfigError: naming the layer that cannot be carried
    :raises ValueError: if no dtype is known
    """
    config = text_config(model if isinstance(model, PreTrainedConfig) else model.config)
    known = dtype or getattr(model, "dtype", None) or config.dtype
    if known is None:
        raise ValueError("the config has no dtype: pass the model, or dtype=")
    plans = plan_layers(config) if plans is None else plans
    head_dims = (dict.fromkeys((plan.key_dim, plan.value_dim)) for plan in plans)
    fields = [
        f"type={config.model_type}",
        f"layers={len(plans)}",
        f"heads={config.num_attention_heads}",
        f"kv_heads={_runs(plan.heads for plan in plans)}",
        f"head_dim={_runs('/'.join(map(str, dims)) for dims in head_dims)}",
        f"hidden={config.hidden_size}",
    ]
    details = [f"rope={_hash(getattr(config, 'rope_parameters', None))}"]
    if tokenizer is not None:
        details.append(f"tokenizer={_vocabulary(tokenizer)}")
    return KVFingerprint(
        model=" ".join([name, *fields]).strip(),
        dtype=str(known).removeprefix("torch."),
        layout=f"HND {_runs(plan.label for plan in plans)}",
        details=" ".join(details),
    )


def pack_fingerprint(fingerprint: KVFingerprint) -> torch.Tensor:
    """Turn it into the bytes that travel as ``extras.fingerprint``."""
    data = bytearray(msgspec.json.encode(fingerprint))
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8))


def check_fingerprint(packed: torch.Tensor, ours: KVFingerprint) -> None:
    """Compare an entry's fingerprint with that of the model at hand.

    :raises IncompatiblePeer: naming the field that differs
    """
    try:
        theirs = msgspec.json.decode(packed.cpu().numpy().tobytes(), type=KVFingerprint)
    except (msgspec.MsgspecError, TypeError, UnicodeDecodeError) as exc:
        raise IncompatiblePeer(
            "the entry's fingerprint cannot be read", field="fingerprint"
        ) from exc
    field = theirs.difference(ours)
    if field is not None:
        raise IncompatiblePeer(
            f"the entry was computed by another model: {field} is "
            f"{getattr(theirs, field)!r}, ours is {getattr(ours, field)!r}",
            field=field,
        )


def _runs(values: Iterable[object]) -> str:
    """``[2, 2, 2, 4]`` as ``2*3,4``."""
    runs = [(value, len(list(run))) for value, run in itertools.groupby(values)]
    return ",".join(f"{v}*{count}" if count > 1 else str(v) for v, count in runs)


def _hash(value: object) -> str:
    data = msgspec.json.encode(value, order="deterministic")
    return hashlib.sha256(data).hexdigest()[:16]


def _vocabulary(tokenizer: PreTrainedTokenizerBase | str) -> str:
    return tokenizer if isinstance(tokenizer, str) else _hash(tokenizer.get_vocab())
