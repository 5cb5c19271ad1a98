"""What must be equal before one model's KV means anything to another."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import torch
import xxhash
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from asynckv.errors import ConfigError, IncompatiblePeer
from asynckv.integrations.transformers.forward import in_thread
from asynckv.integrations.transformers.layers import (
    LayerPlan,
    plan_layers,
    rope_limits,
    text_config,
)
from asynckv.types import KVFingerprint

__all__ = (
    "check_fingerprint",
    "fingerprint_of",
    "pack_fingerprint",
    "read_fingerprint",
)

_ELSEWHERE: Final = frozenset(
    {
        *("base_model_name_or_path", "revision", "inference_mode", "peft_version"),
        *("auto_mapping", "runtime_config", "task_type"),
    }
)
"""What an adapter's config says of its files and of training, not of its KV."""

_WRAPPED: Final = "base_model.model."
"""Where a ``PeftModel`` has the model; ``model.add_adapter`` needs no such thing."""


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

    Adapters of PEFT (LoRA and others) that are in use are part of it: their names,
    configs and weights, all of which are read (100 MB take some 20 ms). Those that
    were merged for good (``merge_and_unload``) are seen no more: give a ``name``.

    :raises ConfigError: naming the layer that cannot be carried, or the adapter that
        adds positions of its own
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
    if limits := [f"{kind}:{most}" for kind, most in rope_limits(config)]:
        details.append(f"rope_limits={','.join(limits)}")
    if tokenizer is not None:
        details.append(f"tokenizer={_vocabulary(tokenizer)}")
    if not isinstance(model, PreTrainedConfig) and (adapters := _adapters(model)):
        details.append(f"adapters={adapters}")
    return KVFingerprint(
        model=" ".join([name, *fields]).strip(),
        dtype=str(known).removeprefix("torch."),
        layout=f"HND {_runs(plan.label for plan in plans)}",
        details=" ".join(details),
    )


async def read_fingerprint(
    model: PreTrainedModel, *, name: str, plans: Sequence[LayerPlan]
) -> KVFingerprint:
    """As :func:`fingerprint_of`, in a thread if there are adapters to be read.

    A cancelled call leaves no trace.

    :raises ConfigError: as there
    """
    if not getattr(model, "peft_config", None):
        return fingerprint_of(model, name=name, plans=plans)
    return await in_thread(
        lambda: fingerprint_of(model, name=name, plans=plans),
        name="asynckv fingerprint",
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


def _adapters(model: PreTrainedModel) -> str:
    """``"name:digest,..."`` of PEFT's adapters in use; PEFT itself is not needed."""
    configs: Mapping[str, Any] = getattr(model, "peft_config", None) or {}
    if not configs:
        return ""
    digests = {name: xxhash.xxh3_128() for name in configs}
    used: set[str] = set()
    if any(getattr(config, "is_prompt_learning", False) for config in configs.values()):
        raise ConfigError(
            "the model has an adapter that adds positions of its own: its KV cannot "
            "be carried",
            hint="LoRA and other adapters of weights can be",
        )
    for path, module in model.named_modules():
        names = _names_in_use(module)
        where = repr((path.removeprefix(_WRAPPED), names)).encode()
        for name in names:
            used.add(name)
            digests[name].update(where)
            for key, value in _weights_of(module, name):
                digests[name].update(f"{key} {value.dtype} {value.shape}".encode())
                data = value.detach().cpu().contiguous()
                digests[name].update(data.view(-1).view(torch.uint8).numpy().data)
    for name in used:
        digests[name].update(_hash(_meaning(configs[name])).encode())
    return ",".join(f"{name}:{digests[name].hexdigest()[:16]}" for name in sorted(used))


def _names_in_use(module: torch.nn.Module) -> tuple[str, ...]:
    """Which adapters change what a layer of PEFT gives; of other layers none."""
    if not hasattr(module, "adapter_layer_names"):
        return ()
    found: Any = module
    return tuple(
        found.merged_adapters
        or (() if found.disable_adapters else found.active_adapters)
    )


def _weights_of(
    module: torch.nn.Module, adapter: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Its tensors have the adapter's name in theirs."""
    for key, value in itertools.chain(
        module.named_parameters(), module.named_buffers()
    ):
        if adapter in key.split("."):
            yield key, value
    scaling = getattr(module, "scaling", None)
    if isinstance(scaling, Mapping) and adapter in scaling:
        yield "scaling", torch.tensor(scaling[adapter], dtype=torch.float64)


def _meaning(config: Any) -> dict[str, str]:
    said: Mapping[str, Any] = config.to_dict()
    return {
        key: str(sorted(value, key=str) if isinstance(value, set) else value)
        for key, value in said.items()
        if key not in _ELSEWHERE
    }


def _vocabulary(tokenizer: PreTrainedTokenizerBase | str) -> str:
    return tokenizer if isinstance(tokenizer, str) else _hash(tokenizer.get_vocab())
