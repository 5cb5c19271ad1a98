"""Load an entry while it is still on the wire, or from a file of its own.

Files are safetensors, nothing is unpickled. What reads and writes them blocks: from
async code, call it in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Final

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from asynckv.abc import KVEntry, KVLookupBuffer, SelectStream
from asynckv.errors import IncompatiblePeer
from asynckv.integrations.transformers.entries import FINGERPRINT
from asynckv.integrations.transformers.fingerprint import (
    check_fingerprint,
    fingerprint_of,
    read_fingerprint,
)
from asynckv.integrations.transformers.handoff import Handoff, ReceivedTensors
from asynckv.integrations.transformers.layers import (
    LayerEvent,
    LayerObserver,
    check_placement,
    plan_layers,
    read_plans,
)
from asynckv.integrations.transformers.prompts import Prompt, pad_token_of
from asynckv.transfers.manifest import check_names, flatten, unflatten
from asynckv.types import TensorSpec
from asynckv.waits.waiting import wait_shielded

__all__ = (
    "Load",
    "handoff_of",
    "load",
    "load_entry",
    "save_entry",
    "tensors_of",
)


_TENSORS_A_TICK: Final = 8
"""What is here already is not waited for: the loop is given back all the same."""


def load(
    model: PreTrainedModel,
    input_ids: torch.Tensor | Sequence[int] | None,
    lookup: KVLookupBuffer,
    *,
    attention_mask: torch.Tensor | None = None,
    name: str = "",
    entry_id: str | None = None,
    min_matched_tokens: int = 1,
    observe: LayerObserver | None = None,
) -> Load:
    """Select a prompt's KV: ``async with load(...) as handoff``.

    Entering waits for a match and for its fingerprint, not for its layers. The
    entry may be for the first part of the prompt; a batch matches the very same
    batch only. Without ``input_ids`` any entry is selected, or that of
    ``entry_id``, with the prompt it was inserted under.

    Leaving cleanly acknowledges the entry, also early: a layer that has not
    landed by then never will. Leaving by an error or a cancellation gives the
    entry back and stops forwards that still wait for it.

    :raises IncompatiblePeer: (on entering) another model computed it; ``field``
        says what differs, and the entry is given back
    :raises ConfigError: naming the layer that cannot be carried, or the devices that
        the model is spread over; or KV of so long a prompt is no other prompt's
    :raises ValueError: if ids and mask are no prompt
    """
    check_placement(model)
    prompt = (
        None
        if input_ids is None
        else Prompt.of(input_ids, attention_mask, pad_token_of(model))
    )
    selecting = lookup.open_drop_select(
        None if prompt is None else prompt.tokens,
        None,
        entry_id=entry_id,
        match="prefix" if prompt is None else prompt.match,
        min_matched_tokens=min_matched_tokens,
    )
    return Load(model, prompt, selecting, name=name, observe=observe)


def handoff_of(
    model: PreTrainedModel,
    entry: KVEntry,
    input_ids: torch.Tensor | Sequence[int] | None = None,
    *,
    attention_mask: torch.Tensor | None = None,
    name: str = "",
    observe: LayerObserver | None = None,
) -> Handoff:
    """Continue from an entry that is here already, as ``drop_select`` returns it.

    Its tensors are not copied: they must not change until the first forward.

    :raises IncompatiblePeer: another model or prompt; ``field`` says what differs
    :raises ConfigError: naming the layer that cannot be carried, or the devices that
        the model is spread over; or KV of so long a prompt is no other prompt's
    """
    check_placement(model)
    tensors = tensors_of(entry)
    plans = plan_layers(model.config)
    if (packed := tensors.get(FINGERPRINT)) is not None:
        check_fingerprint(packed, fingerprint_of(model, name=name, plans=plans))
    landing = ReceivedTensors()
    for key, tensor in tensors.items():
        landing.land(key, tensor)
    landing.complete()

    async def wait_for(key: str) -> torch.Tensor:
        return tensors[key]

    entry_prompt = _entry_prompt(entry.input_tokens)
    given = (
        None
        if input_ids is None
        else Prompt.of(input_ids, attention_mask, pad_token_of(model))
    )
    return Handoff(
        model,
        given or entry_prompt,
        entry_prompt,
        {key: _spec_of(tensor) for key, tensor in tensors.items()},
        wait_for,
        plans=plans,
        landing=landing,
        entry_id=entry.entry_id,
        attempt=entry.attempt,
        observe=observe,
    )


def tensors_of(entry: KVEntry) -> dict[str, torch.Tensor]:
    """Name the tensors of an entry as ``open_insert`` does."""
    named = flatten(entry.key, entry.value, entry.hidden, entry.extras)
    # Blocks no entry holds.
    return {name: t for name, t in named.items() if isinstance(t, torch.Tensor)}


class Load(AbstractAsyncContextManager[Handoff, None]):
    """What :func:`load` returns: enter it, once."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompt: Prompt | None,
        selecting: AbstractAsyncContextManager[SelectStream],
        *,
        name: str,
        observe: LayerObserver | None,
    ) -> None:
        self._model, self._prompt, self._selecting = model, prompt, selecting
        self._name, self._observe = name, observe

    async def __aenter__(self) -> Handoff:
        self._landing = ReceivedTensors()
        plans = await read_plans(self._model.config)
        async with contextlib.AsyncExitStack() as stack:
            stream = await stack.enter_async_context(self._selecting)
            if FINGERPRINT in stream.specs:
                packed = await stream.wait_for(FINGERPRINT)
                ours = await read_fingerprint(self._model, name=self._name, plans=plans)
                check_fingerprint(packed, ours)
            entry_prompt = _entry_prompt(stream.input_tokens)
            self._handoff = Handoff(
                self._model,
                self._prompt or entry_prompt,
                entry_prompt,
                stream.specs,
                stream.wait_for,
                plans=plans,
                landing=self._landing,
                entry_id=stream.entry_id,
                attempt=stream.attempt,
                observe=self._observe,
            )
            self._landing_task = asyncio.create_task(
                self._land(stream), name=f"landing of {stream.entry_id}"
            )
            self._stack = stack.pop_all()
        return self._handoff

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._end_receiving(is_failed=exc is not None)
        except asyncio.CancelledError as late:
            await self._stack.__aexit__(type(late), late, late.__traceback__)
            raise
        await self._stack.__aexit__(exc_type, exc, traceback)

    async def _end_receiving(self, *, is_failed: bool) -> None:
        if is_failed:
            self._landing.stop()
        self._landing.fail(RuntimeError("the load was left before it had landed"))
        try:
            self._landing_task.cancel()
            await wait_shielded(self._landing_task)
        finally:
            self._landing.complete()  # a task that is cancelled does not say so
            self._handoff.detach()

    async def _land(self, stream: SelectStream) -> None:
        landed = 0
        try:
            async for name, tensor in stream:
                self._landing.land(name, tensor)
                self._tell_landed(name)
                landed += 1
                if not landed % _TENSORS_A_TICK:
                    await asyncio.sleep(0)
        except Exception as exc:  # noqa: BLE001 - raised where a tensor is missed
            self._landing.fail(exc)
        self._landing.complete()

    def _tell_landed(self, name: str) -> None:
        parts = name.split(".")
        if self._observe is not None and parts[-1] == "value":
            self._observe(LayerEvent(int(parts[1]), "landed"))


def _spec_of(tensor: torch.Tensor) -> TensorSpec:
    # Its plain name: of torch's own, the spec would have to find it out.
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _entry_prompt(tokens: torch.Tensor | None) -> Prompt:
    if tokens is None:
        raise IncompatiblePeer("the entry has no tokens", field="tokens")
    try:
        return Prompt.of_tokens(tokens)
    except ValueError as exc:
        raise IncompatiblePeer(
            f"the entry's tokens are no prompt: {exc}", field="tokens"
        ) from exc


_TOKENS = "tokens"
_ROI = "roi"


def save_entry(entry: KVEntry, path: str | os.PathLike[str]) -> None:
    """Write ``entry`` to ``path``, whole or not at all. Blocks."""
    tensors = tensors_of(entry)
    for name, tensor in ((_TOKENS, entry.input_tokens), (_ROI, entry.roi)):
        if tensor is not None:
            tensors[name] = tensor
    partial = f"{os.fspath(path)}.partial"
    save_file({name: t.contiguous() for name, t in tensors.items()}, partial)
    os.replace(partial, path)


def load_entry(path: str | os.PathLike[str]) -> KVEntry:
    """Read what :func:`save_entry` wrote. Blocks.

    :raises OSError: if there is no such file
    :raises ValueError: if it holds no entry
    """
    tensors = load_file(os.fspath(path))
    tokens, roi = tensors.pop(_TOKENS, None), tensors.pop(_ROI, None)
    try:
        check_names(tensors)
    except ValueError as exc:
        raise ValueError(f"{path} holds no entry: {exc}") from exc
    return KVEntry(tokens, roi, *unflatten(tensors.items()))
