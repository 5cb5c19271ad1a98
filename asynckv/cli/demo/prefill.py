"""The prefill process: computes prompts and serves the buffer their KV waits in."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

import asynckv
from asynckv.buffers.lookup import LookupBuffer
from asynckv.cli.demo.messages import (
    Computed,
    Doing,
    Failed,
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
    DemoPrompt,
    Place,
    PreparedModel,
    PromptTokenizer,
    load_model,
    loading,
    place_named,
    prepare_model,
)
from asynckv.cli.demo.report import BackpressureSample
from asynckv.cli.demo.worker import (
    Engine,
    LoopLag,
    Stage,
    by_layer,
    resident_bytes,
    ticking,
)
from asynckv.errors import AsyncKVError
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
        send: Callable[[Note], None],
        engine: Engine,
        tokenizer: PromptTokenizer,
        lookup: LookupBuffer,
        document_tokens: int = 0,
    ) -> None:
        """``document_tokens`` of the prompt are those of its document."""
        self._send = send
        self._document_tokens = document_tokens
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
                return await self._prefill_by_layer(order)
            case FillBuffer():
                return await self._fill(order.entry_ids)
            case WaitReturned():
                return await self._wait_returned()
            case ReadBack():
                return Text(self._tokenizer.decode(list(order.tokens)))
        raise ValueError(f"a prefill process does not know {type(order).__name__}")

    async def _prefill_by_layer(self, order: Prefill) -> Prefilled:
        prompt = self._engine.prompt
        if order.document_only:
            prompt = prompt[:, : self._document_tokens]
        lag = LoopLag()
        handed: dict[int, float] = {}

        def note(event: LayerEvent) -> None:
            if event.what == "computed":
                handed[event.layer] = event.at

        with self._engine.timing(self._send_computed) as spans:
            async with lag.watch():
                prefilled = await prefill(
                    self._engine.model,
                    prompt,
                    self._lookup,
                    carry=(),
                    entry_id=order.entry_id,
                    observe=note,
                )
        return Prefilled(
            ended_s=prefilled.computed_at,
            spans=tuple(spans),
            handed_s=by_layer(handed, len(spans)),
            worst_lag_s=lag.worst_s,
        )

    async def _prefill_in_bulk(self, entry_id: str) -> Prefilled:
        lag = LoopLag()
        with self._engine.timing(self._send_computed) as spans:
            async with lag.watch():
                ended_s = await self._engine.compute(self._compute)
                handed_s = time.monotonic()
                await self._insert(entry_id)
        return Prefilled(
            ended_s=ended_s,
            spans=tuple(spans),
            handed_s=(handed_s,) * len(spans),
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
            self._send(Sampled(sample, now.max_bytes))
        samples.append(sample)

    async def _wait_returned(self) -> KeptEntry:
        prompt = self._engine.prompt[0]
        async with asyncio.timeout(_RETURN_DEADLINE_S):
            # A buffer tells nobody that an entry is back, so it is asked.
            while not (matched := await self._lookup.peek(prompt)):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
        return KeptEntry(time.monotonic(), matched)

    def _send_computed(self, layer: int) -> None:
        self._send(Computed(layer))


def main(find_place: Callable[[str], Place] = place_named) -> None:
    """Prepare the model of ``argv``, then serve until the parent hangs up."""
    model, scratch, place = sys.argv[1], Path(sys.argv[2]), find_place(sys.argv[3])
    stage = Stage()

    def on_progress(what: str) -> None:
        stage.send(Doing(what))

    try:
        with loading():
            prepared = prepare_model(model, scratch / "model", on_progress)
            prompts = _Prompts(prepared.tokenizer, (scratch / "prompt").read_bytes())
            loaded = load_model(prepared.folder, place.computes_on, on_progress)
            engine = Engine(loaded, prompts.first, place)
    except (AsyncKVError, OSError, ValueError) as exc:
        stage.send(Failed(str(exc)))
        return
    asyncio.run(_serve(stage, engine, prepared, prompts))


class _Prompts:
    """The tokens of both prompts, which begin with the same document."""

    def __init__(self, tokenizer: PromptTokenizer, encoded: bytes) -> None:
        asked = msgspec.json.decode(encoded, type=DemoPrompt)
        encode = tokenizer.encode_prompt
        self.first = tuple(encode(asked.document, asked.question))
        self.second = tuple(encode(asked.document, asked.second_question))
        pairs = zip(self.first, self.second, strict=False)
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
        self.in_common = len(list(same))


def _warm_up(engine: Engine, stage: Stage) -> int:
    """Compute the prompt once, and return how many bytes its KV has. Blocks."""
    nbytes: list[int] = []
    cache = StreamingCache(
        engine.model, lambda _, *states: nbytes.extend(t.nbytes for t in states)
    )
    layers = len(engine.layers)
    with engine.timing(
        lambda layer: stage.send(Doing("warming up: layer", layer + 1, layers))
    ):
        engine.prefill(cache)
    return sum(nbytes)


async def _serve(
    stage: Stage, engine: Engine, prepared: PreparedModel, prompts: _Prompts
) -> None:
    kv_bytes = await engine.compute(lambda: _warm_up(engine, stage))
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
        worker = PrefillWorker(
            stage.send, engine, prepared.tokenizer, lookup, prompts.in_common
        )
        stage.send(
            Ready(
                pid=os.getpid(),
                url=server.url,
                model=prepared.name,
                folder=str(prepared.folder),
                prompt=prompts.first,
                second_prompt=prompts.second,
                kv_bytes=kv_bytes,
                max_bytes=max_bytes,
                layers=len(engine.layers),
                device=engine.place.describe(),
                torch=str(torch.__version__),
            )
        )
        await stage.perform(worker.do)


if __name__ == "__main__":
    main()
