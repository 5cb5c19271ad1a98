"""One entry that a model can continue from: cuts it, and counts its positions.

The rules that are silent when broken live here. A whole prompt needs its last
position computed again, unless the next token came along; a longer prompt has
its rest computed; a sliding layer must hold the window before the next position.

Its cache may have layers that are still on their way. The loop lands tensors, the
forward's thread takes them up and waits for those that are missing. Lengths are known
from the start, so masks and positions are right before any byte has come; keys and
values cannot be read before they are there, by whatever path.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypedDict

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from asynckv.errors import IncompatiblePeer
from asynckv.integrations.transformers.entries import FIRST_TOKEN, HIDDEN, LOGITS
from asynckv.integrations.transformers.forward import ForwardStopped
from asynckv.integrations.transformers.layers import (
    LayerEvent,
    LayerObserver,
    LayerPlan,
    check_length,
)
from asynckv.integrations.transformers.prompts import Prompt
from asynckv.types import TensorSpec

__all__ = (
    "GenerateKwargs",
    "Handoff",
    "ReceivedTensors",
    "ReceivingCache",
)


class ReceivedTensors:
    """Named tensors between the loop, which lands them, and a thread, which waits."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tensors: dict[str, torch.Tensor] = {}
        self._stopped = False
        self._loop_thread = threading.get_ident()
        self.error: BaseException | None = None
        self.completed: asyncio.Future[None] = (
            asyncio.get_running_loop().create_future()
        )
        """Done when nothing more will land, for better or (``error``) worse."""

    def land(self, name: str, tensor: torch.Tensor) -> None:
        """Let ``tensor`` be taken. Never waits."""
        with self._changed:
            self._tensors[name] = tensor
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Let everyone who waits for what has not landed fail with ``error``."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def complete(self) -> None:
        """Nothing more will land. Never waits."""
        if not self.completed.done():
            self.completed.set_result(None)

    def stop(self) -> None:
        """Let every forward that reads this fail at its next layer. Never waits."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def check(self) -> None:
        """:raises ForwardStopped: after :meth:`stop`"""
        if self._stopped:
            raise ForwardStopped("the generation was cancelled")

    def take(self, name: str) -> torch.Tensor:
        """Wait for ``name`` and hand it out, once. Blocks its thread.

        :raises ForwardStopped: after :meth:`stop`
        :raises RuntimeError: if it would block the loop
        """
        with self._changed:
            while name not in self._tensors:
                self.check()
                if self.error is not None:
                    raise self.error
                if threading.get_ident() == self._loop_thread:
                    raise RuntimeError(
                        f"{name} has not landed, and waiting here would block the "
                        "event loop: await handoff.landed() or handoff.generate()"
                    )
                self._changed.wait()
            self.check()
            return self._tensors.pop(name)


class ReceivingCache(DynamicCache):
    """A cache of ``length`` positions, which may still be on the wire.

    Each use of a layer waits in its thread until the layer has landed, and
    fails with what kept it from landing. ``carried_rows`` says how many
    positions of each layer travel, of the entry's ``entry_length``;
    ``used(layer)`` is called in the forward's thread.
    """

    def __init__(
        self,
        landing: ReceivedTensors,
        plans: Sequence[LayerPlan],
        *,
        length: int,
        entry_length: int,
        carried_rows: Sequence[int],
        device: torch.device,
        used: Callable[[int], None],
    ) -> None:
        super().__init__()
        self._landing = landing
        self.layer_class_to_replicate = None
        self.positions_computed = 0
        self.length = length
        self.layers = [
            _receiving_layer(
                plan,
                _Slice(landing, plan, length, entry_length, rows, device, used),
            )
            for plan, rows in zip(plans, carried_rows, strict=True)
        ]
        self._counted = next(p.index for p in plans if p.kind != "shared")

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for the layer, then extend it.

        :raises ForwardStopped: if the generation was cancelled
        """
        self._landing.check()
        if layer_idx == self._counted:
            self.positions_computed += key_states.shape[-2]
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class _Slice:
    """The positions of one layer that its cache will hold."""

    def __init__(
        self,
        landing: ReceivedTensors,
        plan: LayerPlan,
        length: int,
        entry_length: int,
        rows: int,
        device: torch.device,
        used: Callable[[int], None],
    ) -> None:
        self._landing, self._plan, self._device, self._used = (
            landing,
            plan,
            device,
            used,
        )
        self.length = length
        start = entry_length - rows
        self._rows = slice(plan.first_needed(length) - start, length - start)

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for keys and values. Blocks its thread."""
        name = self._plan.name
        keys = self._landing.take(f"{name}.key")
        values = self._landing.take(f"{name}.value")
        self._used(self._plan.index)
        return self._cut(keys), self._cut(values)

    def _cut(self, states: torch.Tensor) -> torch.Tensor:
        return states[..., self._rows, :].to(self._device)


class _Lands:
    """Mixed into a layer: ``keys`` and ``values`` are there once they have landed."""

    _slice: _Slice | None = None
    _keys: torch.Tensor | None = None
    _values: torch.Tensor | None = None

    @property
    def keys(self) -> torch.Tensor | None:
        self._take_up()
        return self._keys

    @keys.setter
    def keys(self, keys: torch.Tensor | None) -> None:
        self._keys = keys

    @property
    def values(self) -> torch.Tensor | None:
        self._take_up()
        return self._values

    @values.setter
    def values(self, values: torch.Tensor | None) -> None:
        self._values = values

    def _take_up(self) -> None:
        if self._slice is not None:
            self._keys, self._values = self._slice.take()
            self._slice = None


class _ReceivingLayer(_Lands, DynamicLayer):
    stands_for = DynamicLayer

    def __init__(self, rows: _Slice) -> None:
        DynamicLayer.__init__(self)
        self._slice = rows
        self.is_initialized = True

    def get_seq_length(self) -> int:
        """Return the length, known before anything has landed."""
        return super().get_seq_length() if self._slice is None else self._slice.length


class _ReceivingSlidingLayer(_Lands, DynamicSlidingWindowLayer):
    stands_for = DynamicSlidingWindowLayer

    def __init__(self, rows: _Slice, window: int) -> None:
        super().__init__(sliding_window=window)
        self._slice = rows
        self.is_initialized = True
        # Positions seen, not positions held: masks and rope are counted from it.
        self.cumulative_length = rows.length


def _receiving_layer(plan: LayerPlan, rows: _Slice) -> DynamicLayer | DummyLayer:
    if plan.kind == "sliding":
        return _ReceivingSlidingLayer(rows, plan.window)
    if plan.kind == "full":
        return _ReceivingLayer(rows)
    return DummyLayer()


class GenerateKwargs(TypedDict):
    """What ``generate`` needs to go on, and nothing else."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    past_key_values: ReceivingCache


class Handoff:
    """A prompt whose KV was computed elsewhere, all of it or its first part.

    ``length`` positions of each row came with the entry, of ``prompt.length``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompt: Prompt,
        entry_prompt: Prompt,
        specs: Mapping[str, TensorSpec],
        wait_for: Callable[[str], Awaitable[torch.Tensor]],
        *,
        plans: Sequence[LayerPlan],
        landing: ReceivedTensors,
        entry_id: str = "",
        attempt: int = 1,
        observe: LayerObserver | None = None,
    ) -> None:
        """Check ``specs`` against ``model`` before any tensor is waited for.

        :raises IncompatiblePeer: naming what differs
        :raises ConfigError: KV of so long a prompt is no other prompt's
        """
        self.model, self.prompt = model, prompt
        self.entry_id, self.attempt = entry_id, attempt
        self._entry_length = entry_prompt.length
        self._specs, self._wait_for = specs, wait_for
        self.landing, self._observe = landing, observe
        self._loop = asyncio.get_running_loop()
        self._cache: ReceivingCache | None = None
        self._plans = plans
        self._unused = {plan.index for plan in self._plans if plan.kind != "shared"}
        self.taken_up: asyncio.Future[None] = self._loop.create_future()
        """Done when a forward has taken up every layer."""
        dtype = model.dtype  # looks through all parameters: once is enough
        self._rows = [self._rows_of(plan, dtype) for plan in self._plans]
        self.length = prompt.shared_length(entry_prompt)
        if self.length == 0:
            raise IncompatiblePeer(
                f"entry {entry_id!r} holds another prompt", field="tokens"
            )
        longest = max(prompt.length, entry_prompt.length)
        check_length(model.config, longest, is_same=self.is_whole)

    @property
    def is_whole(self) -> bool:
        """The entry is for this very prompt, not for a part of it or for more."""
        return self.length == self.prompt.length == self._entry_length

    @property
    def prompt_positions_computed(self) -> int:
        """How many positions of the prompt this process has computed so far."""
        if self._cache is None:
            return 0
        rest = self.prompt.length - self._cache.length
        return min(self._cache.positions_computed, max(rest, 0))

    async def first_token(self) -> torch.Tensor | None:
        """Return the next token of each row, ``[batch]``, as soon as it has come.

        Chosen greedily by the producer, or here from what it sent. ``None`` if
        nothing of the kind was carried, or if the entry is not for this very
        prompt. No forward is run. A cancelled call leaves no trace.

        :raises EntryAborted: if the producer failed before
        """
        if not self.is_whole:
            return None
        if FIRST_TOKEN in self._specs:
            return await self._wait_for(FIRST_TOKEN)
        logits = await self.logits()
        return None if logits is None else logits.argmax(-1)

    async def logits(self) -> torch.Tensor | None:
        """Return the logits of the prompt's last position, ``[batch, vocabulary]``.

        As they were sent, or the head's output for the hidden state that was,
        which a model may still scale. ``None`` as in :meth:`first_token`. A
        cancelled call leaves no trace.

        :raises EntryAborted: if the producer failed before
        """
        if not self.is_whole:
            return None
        if LOGITS in self._specs:
            return await self._wait_for(LOGITS)
        hidden = await self.hidden()
        head = self.model.get_output_embeddings()
        if hidden is None or head is None:
            return None
        with torch.no_grad():
            logits: torch.Tensor = head(hidden[:, -1].to(self.model.device))
        return logits.float().cpu()

    async def hidden(self) -> torch.Tensor | None:
        """Return the last hidden state ``[batch, 1, size]``, ``None`` as above.

        A cancelled call leaves no trace.

        :raises EntryAborted: if the producer failed before
        """
        if not self.is_whole or HIDDEN not in self._specs:
            return None
        return await self._wait_for(HIDDEN)

    async def landed(self) -> None:
        """Wait until every tensor of the entry is in this process.

        A cancelled call leaves no trace.

        :raises EntryAborted: if the producer failed before
        """
        await asyncio.wait({self.landing.completed})
        if self.landing.error is not None:
            raise self.landing.error

    def generate_kwargs(
        self, first_token: torch.Tensor | None = None
    ) -> GenerateKwargs:
        """Return exactly what ``model.generate`` needs, once.

        Call ``generate`` in a thread (``continue_from`` does):
        it waits in there for layers that have not landed. With ``first_token``
        (see :meth:`first_token`) the prompt is one longer and no position of it
        is computed again; without, the last position is, or all that the entry
        lacks.

        :raises IncompatiblePeer: if the entry's sliding layers do not reach back
            far enough
        :raises RuntimeError: at the second call
        """
        if self._cache is not None:
            raise RuntimeError("a handoff can be continued from once")
        ids, mask = self.prompt.ids, self.prompt.attention_mask
        length = min(self.length, self.prompt.length - 1)
        if first_token is not None:
            if not self.is_whole:
                raise ValueError("the entry is not for this prompt: no first token")
            length = self.length
            ids = torch.cat([ids, first_token.cpu().reshape(-1, 1)], dim=1)
            mask = torch.cat([mask, mask.new_ones(self.prompt.batch, 1)], dim=1)
        self._check_reach(length)
        device = self.model.device
        self._cache = ReceivingCache(
            self.landing,
            self._plans,
            length=length,
            entry_length=self._entry_length,
            carried_rows=self._rows,
            device=device,
            used=self._tell_used,
        )
        return GenerateKwargs(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            past_key_values=self._cache,
        )

    def detach(self) -> None:
        """Let go of the entry, whose memory would live as long. Never waits.

        Layers that have landed stay, what was not read of the rest is gone.
        """
        self._wait_for = _left

    def stop(self) -> None:
        """End a forward that continues from here at its next layer. Never waits."""
        self.landing.stop()

    def _rows_of(self, plan: LayerPlan, dtype: torch.dtype) -> int:
        """How many positions of a layer travel; checks everything else."""
        if plan.kind == "shared":
            return 0
        spec = self._specs.get(f"{plan.name}.key")
        if spec is None or len(spec.shape) != 4:
            raise IncompatiblePeer(
                f"entry {self.entry_id!r} has no keys for layer {plan.index}",
                field="layers",
            )
        rows = spec.shape[2]
        expected = plan.specs(self.prompt.batch, rows, dtype)
        for name, ours in expected.items():
            theirs = self._specs.get(name)
            if theirs != ours:
                field = "dtype" if theirs and theirs.shape == ours.shape else "shape"
                raise IncompatiblePeer(
                    f"{name} is {theirs}, this model needs {ours}", field=field
                )
        full = rows == self._entry_length
        if rows > self._entry_length or not (full or plan.kind == "sliding"):
            raise IncompatiblePeer(
                f"layer {plan.index} holds {rows} positions of {self._entry_length}",
                field="shape",
            )
        return rows

    def _check_reach(self, length: int) -> None:
        for plan, rows in zip(self._plans, self._rows, strict=True):
            missing = self._entry_length - rows - plan.first_needed(length)
            if plan.kind == "sliding" and missing > 0:
                raise IncompatiblePeer(
                    f"layer {plan.index} is {plan.label} and reaches back {missing} "
                    f"positions too few to continue at position {length}",
                    field="window",
                    hint="insert with prefill(), or carry the first token",
                )

    def _tell_used(self, layer: int) -> None:
        """Let the loop know. In the forward's thread."""
        event = LayerEvent(layer, "used")
        self._loop.call_soon_threadsafe(self._note_used, event)

    def _note_used(self, event: LayerEvent) -> None:
        if self._observe is not None:
            self._observe(event)
        self._unused.discard(event.layer)
        if not (self._unused or self.taken_up.done()):
            self.taken_up.set_result(None)


async def _left(name: str) -> torch.Tensor:
    raise RuntimeError(f"the load was left before {name} was read")
