"""A cache whose layers leave while the forward goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from transformers import DynamicCache, PreTrainedModel

from asynckv.errors import ConfigError
from asynckv.integrations.transformers.forward import ForwardStopped
from asynckv.integrations.transformers.layers import LayerPlan, plan_layers
from asynckv.types import TensorSpec

__all__ = ("StreamingCache",)

_HandOver: TypeAlias = Callable[[LayerPlan, torch.Tensor, torch.Tensor], None]


class StreamingCache(DynamicCache):
    """A cache that hands each layer over as soon as a forward has filled it.

    ``hand_over(plan, keys, values)`` is called in the forward's thread, once a
    layer, with the positions that travel. Later forwards hand over nothing.
    ``plans`` are what ``plan_layers`` says of the model, if that is known already.
    What travels is in host memory; with ``stays_on_gpu`` it is where the model is, and
    only what the thread's current stream is given to compute.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        hand_over: _HandOver,
        plans: Sequence[LayerPlan] | None = None,
        *,
        stays_on_gpu: bool = False,
    ) -> None:
        super().__init__()
        self._stays_on_gpu = stays_on_gpu
        self._plans = plan_layers(model.config) if plans is None else plans
        self.layer_class_to_replicate = None
        self.layers = [plan.empty_layer() for plan in self._plans]
        self._dtype = model.dtype
        self._hand_over = hand_over
        self._handed_over: set[int] = set()
        self._is_stopped = False

    def stop(self) -> None:
        """End the forward at its next layer. May be called from any thread."""
        self._is_stopped = True

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill the layer, and hand it over the first time.

        :raises ForwardStopped: after :meth:`stop`
        :raises ConfigError: if the layer is not what the config said
        """
        if self._is_stopped:
            raise ForwardStopped("the prefill was cancelled")
        keys, values = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        if layer_idx not in self._handed_over:
            self._handed_over.add(layer_idx)
            plan = self._plans[layer_idx]
            carried = [self._last_rows(plan, states) for states in (keys, values)]
            self._check(plan, carried)
            self._hand_over(plan, carried[0], carried[1])
        return keys, values

    def _last_rows(self, plan: LayerPlan, states: torch.Tensor) -> torch.Tensor:
        rows = plan.rows_to_carry(states.shape[-2])
        carried = states[..., states.shape[-2] - rows :, :].detach()
        return carried if self._stays_on_gpu else carried.cpu()

    def _check(self, plan: LayerPlan, carried: Sequence[torch.Tensor]) -> None:
        batch, rows = carried[0].shape[0], carried[0].shape[-2]
        planned = plan.specs(batch, rows, self._dtype).values()
        found = [TensorSpec(tuple(t.shape), str(t.dtype)) for t in carried]
        if list(planned) != found:
            raise ConfigError(
                f"layer {plan.index} computed {found}, its config says {list(planned)}",
                hint="this model's cache cannot be declared before the forward",
            )
