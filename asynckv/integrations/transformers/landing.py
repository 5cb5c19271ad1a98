"""A cache whose layers are still on their way.

The loop lands tensors, the forward's thread takes them up and waits for those
that are missing. Lengths are known from the start, so masks and positions are
right before any byte has come; keys and values cannot be read before they are
there, by whatever path.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from asynckv.integrations.transformers.forward import ForwardStopped
from asynckv.integrations.transformers.layers import LayerPlan

__all__ = ("Landing", "LandingCache")


class Landing:
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

    def land_all(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """As :meth:`land`, for all of them, and nothing more will land."""
        with self._changed:
            self._tensors.update(tensors)
            self._changed.notify_all()
        self.complete()

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


class LandingCache(DynamicCache):
    """A cache of ``length`` positions, which may still be on the wire.

    Each use of a layer waits in its thread until the layer has landed, and
    fails with what kept it from landing. ``carried_rows`` says how many
    positions of each layer travel, of the entry's ``entry_length``;
    ``used(layer)`` is called in the forward's thread.
    """

    def __init__(
        self,
        landing: Landing,
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
            _landing_layer(
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
        landing: Landing,
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

    @property
    def window(self) -> int:
        return self._plan.window

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


class _LandingLayer(_Lands, DynamicLayer):
    stands_for = DynamicLayer

    def __init__(self, rows: _Slice) -> None:
        DynamicLayer.__init__(self)
        self._slice = rows
        self.is_initialized = True

    def get_seq_length(self) -> int:
        """Return the length, known before anything has landed."""
        return super().get_seq_length() if self._slice is None else self._slice.length


class _LandingSlidingLayer(_Lands, DynamicSlidingWindowLayer):
    stands_for = DynamicSlidingWindowLayer

    def __init__(self, rows: _Slice) -> None:
        super().__init__(sliding_window=rows.window)
        self._slice = rows
        self.is_initialized = True
        # Positions seen, not positions held: masks and rope are counted from it.
        self.cumulative_length = rows.length


def _landing_layer(plan: LayerPlan, rows: _Slice) -> DynamicLayer | DummyLayer:
    if plan.kind == "sliding":
        return _LandingSlidingLayer(rows)
    if plan.kind == "full":
        return _LandingLayer(rows)
    return DummyLayer()
