"""Prefill: every layer leaves from inside the forward pass.

The forward runs in its own thread and hands layers to the loop, which puts
them into the entry; nothing else runs beside the calling task, so a cancelled
prefill leaves no task behind.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from asynckv.abc import InsertWriter, KVLookupBuffer
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.lookup import RemoteLookupBuffer
from asynckv.errors import ConfigError
from asynckv.integrations.transformers.entries import (
    DEFAULT_CARRY,
    FINGERPRINT,
    Carried,
    Carry,
)
from asynckv.integrations.transformers.fingerprint import (
    pack_fingerprint,
    read_fingerprint,
)
from asynckv.integrations.transformers.forward import Forward, ForwardStopped
from asynckv.integrations.transformers.layers import (
    LayerEvent,
    LayerObserver,
    LayerPlan,
    check_length,
    check_placement,
    plan_layers,
    read_plans,
)
from asynckv.integrations.transformers.prompts import Prompt, pad_token_of
from asynckv.types import TensorSpec

__all__ = (
    "Prefilled",
    "StreamingCache",
    "prefill",
)


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


_LAYERS_A_TICK: Final = 4
"""Small ones need not wait for anything: the loop is given back all the same."""


@dataclasses.dataclass(frozen=True, eq=False)
class Prefilled:
    """A prompt that was computed here and is in the buffer.

    ``cache`` belongs to the caller. ``computed_at`` is when the forward ended,
    in seconds of :func:`time.monotonic`.
    """

    entry_id: str
    carried: Carried
    cache: StreamingCache
    computed_at: float


async def prefill(
    model: PreTrainedModel,
    input_ids: torch.Tensor | Sequence[int],
    lookup: KVLookupBuffer,
    *,
    attention_mask: torch.Tensor | None = None,
    carry: Collection[Carry] = DEFAULT_CARRY,
    name: str = "",
    entry_id: str | None = None,
    ttl_s: float | None = 600.0,
    deliveries: int = 1,
    observe: LayerObserver | None = None,
) -> Prefilled:
    """Compute a prompt's KV and insert it layer by layer, while it is computed.

    Waits for room for the whole entry, then for the forward and for the last
    layer to be in the buffer. A batch is one entry, padded on the left, with
    its ``attention_mask``. ``carry`` says what else travels: the next token,
    chosen greedily, its logits, the last hidden state. ``name`` goes into the
    fingerprint (see ``fingerprint_of``).

    A cancelled call aborts the entry and stops the forward at its next layer;
    it waits for that, at most 1 s.

    :raises ConfigError: naming the layer that cannot be carried, or the devices that
        the model is spread over; or so long a prompt's KV cannot be handed over
    :raises TypeError: if ``carry`` is no collection of names
    :raises ValueError: if ids and mask are no prompt, or ``carry`` names anything else
    :raises EntryAborted: if the entry is gone before it was complete
    """
    prompt = Prompt.of(input_ids, attention_mask, pad_token_of(model))
    check_placement(model)
    check_length(model.config, prompt.length, is_same=True)
    plans = await read_plans(model.config)
    stays = _stays_on_gpu(model, lookup)
    run = _Prefill(model, prompt, plans, carry, observe, stays_on_gpu=stays)
    fingerprint = await read_fingerprint(model, name=name, plans=plans)
    packed = pack_fingerprint(fingerprint)
    async with lookup.open_insert(
        run.prompt.tokens,
        None,
        run.specs(packed),
        entry_id=entry_id,
        ttl_s=ttl_s,
        deliveries=deliveries,
    ) as writer:
        await writer.put(FINGERPRINT, packed)
        return await run.into(writer)


_Layer: TypeAlias = (
    "tuple[LayerPlan, torch.Tensor, torch.Tensor, torch.cuda.Event | None]"
)
_Result: TypeAlias = "tuple[Carried, float]"


class _Prefill:
    """One prefill on its way into one entry."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompt: Prompt,
        plans: Sequence[LayerPlan],
        carry: Collection[Carry],
        observe: LayerObserver | None,
        *,
        stays_on_gpu: bool,
    ) -> None:
        self.prompt = prompt
        self._model, self._carry, self._observe = model, carry, observe
        self._plans = [plan for plan in plans if plan.kind != "shared"]
        self._loop = asyncio.get_running_loop()
        # None is put when the forward has ended, after its last layer.
        self._computed: asyncio.Queue[_Layer | None] = asyncio.Queue()
        self._cache = StreamingCache(
            model, self._hand_over, plans, stays_on_gpu=stays_on_gpu
        )

    def specs(self, fingerprint: torch.Tensor) -> dict[str, TensorSpec]:
        batch, length = self.prompt.batch, self.prompt.length
        dtype = self._model.dtype  # looks through all parameters: once is enough
        specs = {FINGERPRINT: TensorSpec(tuple(fingerprint.shape), "uint8")}
        for plan in self._plans:
            rows = plan.rows_to_carry(length)
            specs |= plan.specs(batch, rows, dtype)
        return specs | Carried.specs(self._model, batch, self._carry)

    async def into(self, writer: InsertWriter) -> Prefilled:
        forward = Forward(self._forward, self._cache.stop, name="asynckv prefill")
        forward.ended.add_done_callback(lambda _: self._computed.put_nowait(None))
        try:
            carried, computed_at = await self._put_all(writer, forward)
        finally:
            await forward.aclose()
        return Prefilled(writer.entry_id, carried, self._cache, computed_at)

    async def _put_all(
        self, writer: InsertWriter, forward: Forward[_Result]
    ) -> _Result:
        missing = {plan.index for plan in self._plans}
        result: _Result | None = None
        while missing or result is None:
            if result is None and forward.ended.done():
                # Few bytes, and enough for a first token: they overtake the layers.
                result = forward.result()
                await _put(writer, result[0].tensors())
            elif result is not None and self._computed.empty():
                raise ConfigError(f"layer {min(missing)} never used the cache")
            elif (layer := await self._computed.get()) is not None:
                await self._put_layer(writer, *layer)
                missing.discard(layer[0].index)
                if not len(missing) % _LAYERS_A_TICK:
                    await asyncio.sleep(0)
        return result

    async def _put_layer(
        self,
        writer: InsertWriter,
        plan: LayerPlan,
        keys: torch.Tensor,
        values: torch.Tensor,
        made: torch.cuda.Event | None,
    ) -> None:
        if made is not None:  # what is put is what this thread's stream has waited for
            torch.cuda.current_stream(keys.device).wait_event(made)
        await _put(writer, {f"{plan.name}.key": keys, f"{plan.name}.value": values})
        self._notify(LayerEvent(plan.index, "sent"))

    def _hand_over(
        self, plan: LayerPlan, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Let the loop have a layer. In the forward's thread."""
        self._loop.call_soon_threadsafe(
            self._take_over,
            LayerEvent(plan.index, "computed"),
            (plan, keys, values, _mark(keys)),
        )

    def _take_over(self, event: LayerEvent, layer: _Layer) -> None:
        self._notify(event)
        self._computed.put_nowait(layer)

    def _notify(self, event: LayerEvent) -> None:
        if self._observe is not None:
            self._observe(event)

    def _forward(self) -> _Result:
        with torch.no_grad():
            output = _forward_prompt(
                self._model,
                self.prompt,
                self._cache,
                output_hidden_states="hidden" in self._carry,
            )
            states = output.hidden_states
            hidden = states[-1][:, -1:] if states and "hidden" in self._carry else None
            if output.logits is None:
                raise ConfigError(f"{type(self._model).__name__} gives no logits")
            carried = Carried.of(output.logits[:, -1], hidden, self._carry)
        return carried, time.monotonic()


def _stays_on_gpu(model: PreTrainedModel, lookup: KVLookupBuffer) -> bool:
    """Can layers go into the buffer without leaving their GPU?"""
    on = "cpu"
    if isinstance(lookup, LookupBuffer):
        on = lookup.device
    elif isinstance(lookup, RemoteLookupBuffer):
        on = lookup.sends_from
    return on != "cpu" and model.device == torch.device(on)


def _mark(computed: torch.Tensor) -> torch.cuda.Event | None:
    """Mark where the forward's stream is, which is not that of the loop's thread."""
    if not computed.is_cuda:
        return None
    mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
    mark.record(torch.cuda.current_stream(computed.device))
    return mark


async def _put(writer: InsertWriter, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        await writer.put(name, tensor)


def _forward_prompt(
    model: PreTrainedModel,
    prompt: Prompt,
    cache: DynamicCache,
    *,
    output_hidden_states: bool,
) -> CausalLMOutputWithPast:
    """Run the whole prompt through ``model`` as ``generate`` would. Blocks."""
    accepted = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"use_cache": True}
    if "position_ids" in accepted:
        # Without them a forward counts padding, and generate does not.
        options["position_ids"] = prompt.position_ids.to(model.device)
    if "logits_to_keep" in accepted:
        options["logits_to_keep"] = 1
    if output_hidden_states:
        options["output_hidden_states"] = True
    mask = prompt.attention_mask.to(model.device) if prompt.is_padded else None
    # GenerationMixin is mixed into the model's class, which its type does not say.
    prepare: Any = model.prepare_inputs_for_generation
    inputs = prepare(
        prompt.ids.to(model.device),
        past_key_values=cache,
        attention_mask=mask,
        is_first_iteration=True,
        **options,
    )
    # Phi-3 drops a cache from before a prompt was so long, also one of nothing.
    inputs["past_key_values"] = cache
    output: CausalLMOutputWithPast = model(**inputs, return_dict=True)
    return output
