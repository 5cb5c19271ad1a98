"""The prefill process: computes prompts and serves the buffer their KV waits in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import asynckv
from asynckv.buffers.lookup import LookupBuffer
from asynckv.cli.demo.engine import Engine
from asynckv.cli.demo.measurements import LoopLag, resident_bytes, ticking
from asynckv.cli.demo.messages import (
    Computed,
    FillBuffer,
    Filled,
    KeptEntry,
    Note,
    Order,
    Prefill,
    Prefilled,
    ReadBack,
    Ready,
    Sampled,
    Text,
    WaitReturned,
)
from asynckv.cli.demo.models import (
    PreparedModel,
    PromptTokenizer,
    load_model,
    loading,
    prepare_model,
)
from asynckv.cli.demo.place import Place, place_named
from asynckv.cli.demo.report import BackpressureSample
from asynckv.cli.demo.stage import Stage
from asynckv.integrations.transformers import (
    LayerEvent,
    LayerPlan,
    StreamingCache,
    fingerprint_of,
    prefill,
)

__all__ = ("PrefillWorker", "main")

_ROOM_IN_ENTRIES = 2.5
_SAMPLE_EVERY_S = 0.02
_POLL_S = 0.001
_RETURN_DEADLINE_S = 30.0


class PrefillWorker:
    """Carries out the parent's orders."""

    def __init__(
        self,
        tell: Callable[[Note], None],
        engine: Engine,
        tokenizer: PromptTokenizer,
        lookup: LookupBuffer,
    ) -> None:
        self._tell = tell
        self._engine = engine
        self._tokenizer = tokenizer
        self._lookup = lookup
        self._keys: dict[str, torch.Tensor] = {}
        self._values: dict[str, torch.Tensor] = {}

    async def do(self, order: Order) -> Note:
        """Carry out one order."""
        match order:
            case Prefill(way="bulk"):
                return await self._prefill_in_bulk(order.entry_id)
            case Prefill():
                return await self._prefill_by_layer(order.entry_id)
            case FillBuffer():
                return await self._fill(order.entry_ids)
            case WaitReturned():
                return await self._wait_returned()
            case ReadBack():
                return Text(self._tokenizer.decode(list(order.tokens)))
        raise ValueError(f"a prefill process does not know {type(order).__name__}")

    async def _prefill_by_layer(self, entry_id: str) -> Prefilled:
        lag, clock = LoopLag(), self._engine.layer_clock()
        handed: dict[int, float] = {}

        def note(event: LayerEvent) -> None:
            if event.what == "computed":
                handed[event.layer] = event.at

        with clock.timing(self._tell_computed):
            async with lag.watch():
                prefilled = await prefill(
                    self._engine.model,
                    self._engine.prompt,
                    self._lookup,
                    carry=(),
                    entry_id=entry_id,
                    observe=note,
                )
        return Prefilled(
            began_s=clock.spans[0][0],
            ended_s=prefilled.computed_at,
            spans=tuple(clock.spans),
            handed_s=_by_layer(handed, len(clock.spans)),
            worst_lag_s=lag.worst_s,
        )

    async def _prefill_in_bulk(self, entry_id: str) -> Prefilled:
        lag, clock = LoopLag(), self._engine.layer_clock()
        with clock.timing(self._tell_computed):
            async with lag.watch():
                ended_s = await self._engine.compute(self._compute)
                handed_s = time.monotonic()
                await self._insert(entry_id)
        return Prefilled(
            began_s=clock.spans[0][0],
            ended_s=ended_s,
            spans=tuple(clock.spans),
            handed_s=(handed_s,) * len(clock.spans),
            worst_lag_s=lag.worst_s,
        )

    def _compute(self) -> float:
        """Compute the prompt and keep its KV. In the computing thread."""
        engine = self._engine
        cache = StreamingCache(
            engine.model, self._keep, stays_on_gpu=engine.place.is_gpu
        )
        engine.prefill(cache)
        return time.monotonic()

    def _keep(self, plan: LayerPlan, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._keys[plan.name] = keys
        self._values[plan.name] = values

    async def _insert(self, entry_id: str) -> None:
        await self._lookup.insert(
            self._engine.prompt[0],
            None,
            self._keys,
            self._values,
            None,
            entry_id=entry_id,
        )

    async def _fill(self, entry_ids: tuple[str, ...]) -> Filled:
        lag = LoopLag()
        samples: list[BackpressureSample] = []

        async def insert(entry_id: str) -> float:
            began_s = time.monotonic()
            await self._insert(entry_id)
            return time.monotonic() - began_s

        async with lag.watch(), ticking(_SAMPLE_EVERY_S, lambda: self._sample(samples)):
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(insert(entry_id)) for entry_id in entry_ids]
        waits_s = tuple(task.result() for task in tasks)
        return Filled(waits_s, tuple(samples), lag.worst_s)

    def _sample(self, samples: list[BackpressureSample]) -> None:
        now = self._lookup.statistics()
        sample = BackpressureSample(
            at_s=time.monotonic(),
            buffered_bytes=now.used_bytes,
            resident_bytes=resident_bytes(),
            waiting=now.waiting_inserts,
        )
        if len(samples) % 5 == 0:
            self._tell(Sampled(sample, now.max_bytes))
        samples.append(sample)

    async def _wait_returned(self) -> KeptEntry:
        prompt = self._engine.prompt[0]
        async with asyncio.timeout(_RETURN_DEADLINE_S):
            # A buffer tells nobody that an entry is back, so it is asked.
            while not (matched := await self._lookup.peek(prompt)):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
        return KeptEntry(time.monotonic(), matched)

    def _tell_computed(self, layer: int) -> None:
        self._tell(Computed(layer))


def _by_layer(times: dict[int, float], layers: int) -> tuple[float, ...]:
    # A layer that shares another one's cache has nothing to hand over.
    earliest = min(times.values())
    return tuple(times.get(layer, earliest) for layer in range(layers))


def main(find_place: Callable[[str], Place] = place_named) -> None:
    """Prepare the model of ``argv``, then serve until the parent hangs up."""
    model, scratch, place = sys.argv[1], Path(sys.argv[2]), find_place(sys.argv[3])
    stage = Stage()
    with loading():
        prepared = prepare_model(model, scratch / "model")
        text = (scratch / "prompt").read_text(encoding="utf-8")
        prompt = tuple(prepared.tokenizer.encode_prompt(text))
        engine = Engine(load_model(prepared.folder, place.computes_on), prompt, place)
    asyncio.run(_serve(stage, engine, prepared, prompt))


def _warm_up(engine: Engine) -> int:
    """Compute the prompt once, and return how many bytes its KV has. Blocks."""
    nbytes: list[int] = []
    cache = StreamingCache(
        engine.model, lambda _, *states: nbytes.extend(t.nbytes for t in states)
    )
    engine.prefill(cache)
    return sum(nbytes)


async def _serve(
    stage: Stage, engine: Engine, prepared: PreparedModel, prompt: tuple[int, ...]
) -> None:
    kv_bytes = await engine.compute(lambda: _warm_up(engine))
    max_bytes = int(kv_bytes * _ROOM_IN_ENTRIES)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(engine.close)
        fingerprint, device = fingerprint_of(engine.model), engine.place.device
        lookup = LookupBuffer(max_bytes, fingerprint=fingerprint, device=device)
        stack.callback(lookup.abort)
        await lookup.open()
        server = await stack.enter_async_context(
            asynckv.serve("tcp://127.0.0.1:0", lookup=lookup)
        )
        worker = PrefillWorker(stage.tell, engine, prepared.tokenizer, lookup)
        stage.tell(
            Ready(
                pid=os.getpid(),
                url=server.url,
                model=prepared.name,
                folder=str(prepared.folder),
                prompt=prompt,
                kv_bytes=kv_bytes,
                max_bytes=max_bytes,
                layers=len(engine.layers),
                device=engine.place.describe(),
            )
        )
        await stage.perform(worker.do)


if __name__ == "__main__":
    main()
