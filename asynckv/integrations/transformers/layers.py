"""What each layer's cache holds, known from the config before a forward runs.

Kinds that keep more than keys and values of past tokens are refused by name:
dropping that state would give wrong tokens without a word. A layer is
``[batch, heads, tokens, dim]``: HND of paged engines with a batch in front.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal, TypeAlias, cast

import torch
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    get_layer_types_and_kwargs,
)

from asynckv.errors import ConfigError
from asynckv.integrations.transformers.forward import in_thread
from asynckv.types import TensorSpec

__all__ = (
    "LayerEvent",
    "LayerKind",
    "LayerObserver",
    "LayerPlan",
    "check_cache",
    "check_length",
    "check_placement",
    "from_blocks",
    "plan_layers",
    "read_plans",
    "rope_limits",
    "swap_heads_and_tokens",
    "text_config",
    "to_blocks",
)


LayerKind = Literal["full", "sliding", "shared"]
"""``shared`` layers read another layer's cache and have nothing to carry."""

_KINDS: Final[Mapping[type, LayerKind]] = types.MappingProxyType(
    {
        DynamicLayer: "full",
        DynamicSlidingWindowLayer: "sliding",
        DummyLayer: "shared",
    }
)

_Described: TypeAlias = tuple[LayerKind, int, int, int, int]


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """One layer: kind, window and the shape of its keys and values."""

    index: int
    kind: LayerKind
    window: int
    heads: int
    key_dim: int
    value_dim: int

    @property
    def name(self) -> str:
        """The ``LAYER`` of ``LAYER.key`` and ``LAYER.value``."""
        return f"layers.{self.index}"

    @property
    def label(self) -> str:
        return f"{self.kind}({self.window})" if self.kind == "sliding" else self.kind

    def rows_to_carry(self, length: int) -> int:
        """Positions that travel of ``length``: the last ones.

        A sliding layer sends one more than its cache keeps (``window``, not
        ``window - 1``), so that the last position can be computed again.
        """
        return min(length, self.window) if self.kind == "sliding" else length

    def first_needed(self, length: int) -> int:
        """The first position that a cache of ``length`` positions must hold."""
        return max(0, length - self.window + 1) if self.kind == "sliding" else 0

    def empty_layer(self) -> CacheLayerMixin | DummyLayer:
        """Return what a ``DynamicCache`` has for such a layer."""
        if self.kind == "sliding":
            return DynamicSlidingWindowLayer(sliding_window=self.window)
        return DynamicLayer() if self.kind == "full" else DummyLayer()

    def specs(self, batch: int, rows: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """Names and specs of its tensors; none for a shared layer."""
        if self.kind == "shared":
            return {}
        name = str(dtype).removeprefix("torch.")
        return {
            f"{self.name}.key": TensorSpec(
                (batch, self.heads, rows, self.key_dim), name
            ),
            f"{self.name}.value": TensorSpec(
                (batch, self.heads, rows, self.value_dim), name
            ),
        }


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the decoder's config.

    :raises ConfigError: for an encoder-decoder, whose second cache is not carried
    """
    if config.is_encoder_decoder:
        raise ConfigError(
            f"{config.model_type} is an encoder-decoder: its cross-attention cache "
            "cannot be carried"
        )
    decoder: PreTrainedConfig = config.get_text_config(decoder=True)
    return decoder


def plan_layers(config: PreTrainedConfig) -> tuple[LayerPlan, ...]:
    """Say what each layer's cache will hold.

    Takes a few microseconds a layer, or 40 where each layer has a config of its
    own: :func:`read_plans` does that off the event loop.

    :raises ConfigError: naming the layer and the kind that cannot be carried
    """
    config = cast(PreTrainedConfig, _ReadOnce(text_config(config)))
    kinds, options = get_layer_types_and_kwargs(config)
    known: dict[tuple[str, int], _Described] = {}
    plans = []
    for index, (kind, layer_options, layer_config) in enumerate(
        zip(kinds, options, config.per_layer_config, strict=True)
    ):
        key = (kind, id(layer_config))
        if key not in known:
            known[key] = _describe(index, kind, layer_options, layer_config)
        plans.append(LayerPlan(index, *known[key]))
    return tuple(plans)


async def read_plans(config: PreTrainedConfig) -> tuple[LayerPlan, ...]:
    """As :func:`plan_layers`, in a thread if it takes longer than to start one.

    A cancelled call leaves no trace.

    :raises ConfigError: naming the layer and the kind that cannot be carried
    """
    if not text_config(config).is_heterogeneous:
        plans = plan_layers(config)
        await asyncio.sleep(0)  # what the caller goes on with takes its time too
        return plans
    return await in_thread(lambda: plan_layers(config), name="asynckv plan")


def check_cache(cache: Cache, plans: tuple[LayerPlan, ...]) -> None:
    """Make sure that ``cache`` is of the kinds planned, layer by layer.

    :raises ConfigError: naming the layer and the kind that cannot be carried
    """
    # One made without the config ends before the layers that share another's.
    left = plans[len(cache.layers) :]
    if len(cache.layers) > len(plans) or any(plan.kind != "shared" for plan in left):
        raise ConfigError(
            f"{type(cache).__name__} of {len(cache.layers)} layers for a model of "
            f"{len(plans)}",
            hint="hand over the cache that the model itself has filled",
        )
    for plan, layer in zip(plans, cache.layers, strict=False):
        kind = _kind_of(type(layer))
        # A cache made without the config keeps all positions of every layer.
        if kind not in (plan.kind, "full"):
            raise _refusal(plan.index, type(layer).__name__)


def check_placement(model: PreTrainedModel) -> None:
    """Make sure that all of ``model`` is on one device: its KV is handed over to one.

    :raises ConfigError: naming the devices that a ``device_map`` spreads it over
    """
    spread: Mapping[str, object] = getattr(model, "hf_device_map", None) or {}
    names = (f"cuda:{on}" if isinstance(on, int) else str(on) for on in spread.values())
    devices = sorted({"cuda:0" if name == "cuda" else name for name in names})
    if len(devices) > 1:
        raise ConfigError(
            f"device_map spreads the model over {', '.join(devices)}: KV is handed "
            "over to one device",
            hint='load it on one: device_map={"": 0}',
        )


def check_length(
    config: PreTrainedConfig, length: int, *, is_same: bool = False
) -> None:
    """Make sure that tokens of a prompt so long have the KV they have in any other.

    With some rotary embeddings they have up to some length alone. ``longrope`` has one
    other set for all longer prompts, so that the very same one (``is_same``) can go on
    from there; with ``dynamic`` it depends on what the model has computed before, too.

    :raises ConfigError: it is too long
    """
    for kind, most in rope_limits(text_config(config)):
        if length > most and not (is_same and kind == "longrope"):
            only = "a longer one goes on from an entry for the very same prompt alone"
            raise ConfigError(
                f"with {kind!r} rotary embeddings {config.model_type} has other KV, "
                f"from the first token on, of prompts of more than {most} tokens: one "
                f"here has {length}",
                hint=f"hand over prompts of up to {most} tokens"
                + f"; {only}" * (kind == "longrope"),
            )


def rope_limits(config: PreTrainedConfig) -> Iterator[tuple[str, int]]:
    """Say up to which length the keys of a token are always the same, by rope type."""
    found = getattr(config, "rope_parameters", None) or {}
    for one in (found, *found.values()):  # of all layers, or of each type of them
        kind = str(one.get("rope_type")) if isinstance(one, Mapping) else ""
        if kind == "longrope":
            yield kind, one["original_max_position_embeddings"]
        elif "dynamic" in kind:
            # At the maximum itself a model goes on with what a longer prompt has left.
            yield kind, config.max_position_embeddings - 1


class _ReadOnce:
    """A config as a plan reads it.

    An attribute of transformers' own takes microseconds to read, and a layer's
    config is made anew whenever it is asked for.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        self._config = config
        self._missing: set[str] = set()
        self.per_layer_config: list[Any] = (
            list(config.per_layer_config)
            if config.is_heterogeneous
            else [self] * config.num_hidden_layers
        )

    def __getattr__(self, name: str) -> Any:
        if name not in self._missing:
            try:
                self.__dict__[name] = value = getattr(self._config, name)
            except AttributeError:
                self._missing.add(name)
            else:
                return value
        raise AttributeError(name)


def _describe(
    index: int, kind_name: str, options: dict[str, object], config: PreTrainedConfig
) -> _Described:
    """Return kind, window and shape of a layer."""
    kind = _kind_of(DYNAMIC_LAYER_TYPE_MAPPING.get(kind_name))
    if kind is None:
        raise _refusal(index, kind_name)
    window = options.get("sliding_window", 0)
    if kind == "sliding" and not isinstance(window, int):
        raise ConfigError(f"layer {index} is {kind_name!r} without a window")
    heads, key_dim, value_dim = _shape_of(config)
    window = window if isinstance(window, int) else 0
    return kind, window, heads, key_dim, value_dim


def _kind_of(layer_class: type | None) -> LayerKind | None:
    # Subclasses hold more than keys and values, so the class must be this very one,
    # or one of ours.
    if layer_class is None:
        return None
    return _KINDS.get(getattr(layer_class, "stands_for", layer_class))


def _shape_of(config: PreTrainedConfig) -> tuple[int, int, int]:
    latent = getattr(config, "kv_lora_rank", None)
    if latent is not None:
        # Multi-head latent attention caches one compressed head and its rope part.
        return 1, int(latent), int(config.qk_rope_head_dim)
    heads = int(config.num_attention_heads)
    kv_heads = getattr(config, "num_key_value_heads", None)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(kv_heads or heads), int(head_dim), int(head_dim)


def _refusal(index: int, kind: str) -> ConfigError:
    return ConfigError(
        f"layer {index} is {kind!r}, a kind of cache that cannot be carried",
        hint="only keys and values of a DynamicCache are: full_attention, "
        "sliding_attention, chunked_attention and layers that share another's",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class LayerEvent:
    """One step of one layer, at a time of :func:`time.monotonic`.

    ``computed`` and ``sent`` (the producer's buffer has it) in the prefill;
    ``landed`` and ``used`` (the forward took it up) in the decode. On Linux the
    clock is the same in all processes of a host.
    """

    layer: int
    what: Literal["computed", "sent", "landed", "used"]
    at: float = dataclasses.field(default_factory=time.monotonic)


LayerObserver: TypeAlias = Callable[[LayerEvent], None]
"""Called on the loop; must not wait and must not raise."""


def swap_heads_and_tokens(states: torch.Tensor) -> torch.Tensor:
    """Turn HND into NHD, or NHD into HND: a view; batch dimensions stay in front."""
    return states.transpose(-3, -2)


def to_blocks(states: torch.Tensor, block_size: int) -> torch.Tensor:
    """Cut ``[heads, tokens, dim]`` into ``[blocks, heads, block_size, dim]``.

    The last block is filled up with zeros.
    """
    heads, tokens, dim = states.shape
    blocks = -(-tokens // block_size)
    padded = states.new_zeros(heads, blocks * block_size, dim)
    padded[:, :tokens] = states
    return padded.reshape(heads, blocks, block_size, dim).transpose(0, 1).contiguous()


def from_blocks(blocks: torch.Tensor, tokens: int) -> torch.Tensor:
    """Put ``[blocks, heads, block_size, dim]`` together again: the first ``tokens``.

    :raises ValueError: if the blocks hold fewer
    """
    count, heads, block_size, dim = blocks.shape
    if tokens > count * block_size:
        raise ValueError(f"{count} blocks of {block_size} hold no {tokens} tokens")
    joined = blocks.transpose(0, 1).reshape(heads, count * block_size, dim)
    return joined[:, :tokens].contiguous()
