"""The decode process: takes KV out of the prefill's buffer and goes on from it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asynckv
from asynckv.abc import KVLookupBuffer
from asynckv.cli.demo.messages import (
    Continue,
    Doing,
    Generated,
    Landed,
    Load,
    Note,
    Order,
    Ready,
    Select,
    SelectSlowly,
    SlowlySelected,
)
from asynckv.cli.demo.models import HOST, Place, load_model, loading, place_named
from asynckv.cli.demo.worker import (
    MAX_NEW_TOKENS,
    Continuation,
    Engine,
    LoopLag,
    Stage,
    TokenClock,
    by_layer,
    timing_layers,
)
from asynckv.integrations.transformers import (
    LayerEvent,
    continue_from,
    fingerprint_of,
    generate_from,
    handoff_of,
)

__all__ = ("DecodeWorker", "main")

_WARM_UP_TOKENS = 4


class DecodeWorker:
    """Carries out the parent's orders."""

    def __init__(
        self,
        send: Callable[[Note], None],
        stack: contextlib.AsyncExitStack,
        place: Place = HOST,
    ) -> None:
        self._send = send
        self._stack = stack
        self._place = place
        self._loaded: tuple[Engine, KVLookupBuffer] | None = None
        self._second_prompt: tuple[int, ...] = ()

    async def do(self, order: Order) -> Note:
        """Carry out one order."""
        match order:
            case Load():
                return await self._load(order)
            case Continue():
                engine = self._engine(second=order.second)
                tokens = 1 if order.first_only else MAX_NEW_TOKENS
                return await self._recompute(engine, tokens)
            case Select(way="bulk"):
                return await self._select_in_bulk()
            case Select():
                engine = self._engine(second=order.second)
                return await self._select_by_layer(engine, order.dies_after)
            case SelectSlowly():
                return await self._select_slowly(order.entries, order.pause_s)
        raise ValueError(f"a decode process does not know {type(order).__name__}")

    def use(
        self,
        engine: Engine,
        lookup: KVLookupBuffer,
        second_prompt: tuple[int, ...] = (),
    ) -> None:
        """Take KV out of ``lookup`` from here on."""
        self._loaded = engine, lookup
        self._second_prompt = second_prompt

    async def _load(self, order: Load) -> Ready:
        # Nothing else happens on this loop yet.
        with loading():
            model = load_model(
                Path(order.folder),
                self._place.computes_on,
                lambda what: self._send(Doing(what)),
            )
            engine = Engine(model, order.prompt, self._place)
        self._stack.callback(engine.close)
        options: dict[str, Any] = {"fingerprint": fingerprint_of(engine.model)}
        if self._place.device is not None:  # that much is allocated at once
            options |= {"device": self._place.device, "max_bytes": order.max_bytes}
        peer = await self._stack.enter_async_context(
            asynckv.connect(order.url, **options)
        )
        if order.warm_up:
            with self._computing(engine, "warming up: layer"):
                await engine.compute(
                    lambda: engine.generate(TokenClock(), _WARM_UP_TOKENS)
                )
        self.use(engine, peer.lookup, order.second_prompt)
        scheme = order.url.partition(":")[0]
        return Ready(pid=os.getpid(), transport=f"{scheme}, {peer.transport} payload")

    async def _recompute(self, engine: Engine, max_new_tokens: int) -> Generated:
        lag = LoopLag()
        with (
            engine.recording(self._send_decoding) as recording,
            self._computing(engine, "recomputing: layer"),
        ):
            async with lag.watch():
                sequences = await engine.compute(
                    lambda: engine.generate(recording.clock, max_new_tokens)
                )
        done = engine.continuation(recording, sequences)
        return _generated(done, lag)

    async def _select_in_bulk(self) -> Generated:
        engine, lookup = self._ready()
        lag = LoopLag()
        with engine.recording(self._send_decoding) as recording:
            async with lag.watch():
                entry = await lookup.drop_select(engine.prompt[0])
                landed_s = time.monotonic()
                for layer in range(len(engine.layers)):
                    self._send(Landed(layer))
                generated = await continue_from(
                    handoff_of(engine.model, entry, engine.prompt),
                    use_carried=False,
                    **engine.options(recording.clock),
                )
        done = engine.continuation(recording, generated.sequences)
        landed = (landed_s,) * len(engine.layers)
        return _generated(done, lag, landed, entry.attempt)

    async def _select_by_layer(self, engine: Engine, dies_after: int) -> Generated:
        _, lookup = self._ready()
        lag = LoopLag()
        landed: dict[int, float] = {}

        def note(event: LayerEvent) -> None:
            if event.what == "landed":
                landed[event.layer] = event.at
                self._send(Landed(event.layer))
                if len(landed) == dies_after:
                    os.kill(os.getpid(), signal.SIGKILL)

        with engine.recording(self._send_decoding) as recording:
            async with lag.watch():
                generated = await generate_from(
                    engine.model,
                    engine.prompt,
                    lookup,
                    use_carried=False,
                    observe=note,
                    **engine.options(recording.clock),
                )
        done = engine.continuation(recording, generated.sequences)
        times = by_layer(landed, len(engine.layers))
        return _generated(done, lag, times, generated.attempt, generated.matched_tokens)

    async def _select_slowly(self, entries: int, pause_s: float) -> SlowlySelected:
        engine, lookup = self._ready()
        lag = LoopLag()
        taken: list[str] = []
        async with lag.watch():
            for _ in range(entries):
                await asyncio.sleep(pause_s)
                entry = await lookup.drop_select(engine.prompt[0])
                taken.append(entry.entry_id)
        return SlowlySelected(tuple(taken), lag.worst_s)

    @contextlib.contextmanager
    def _computing(self, engine: Engine, what: str) -> Iterator[None]:
        """Send how far the first forward within the block is."""
        layers = len(engine.layers)

        def computed(layer: int) -> None:
            if layer < layers:
                self._send(Doing(what, layer + 1, layers))

        with timing_layers(engine.layers, computed):
            yield

    def _send_decoding(self, tokens: int) -> None:
        self._send(Doing("decoding: token", tokens, MAX_NEW_TOKENS))

    def _engine(self, *, second: bool) -> Engine:
        engine, _ = self._ready()
        return engine.for_prompt(self._second_prompt) if second else engine

    def _ready(self) -> tuple[Engine, KVLookupBuffer]:
        if self._loaded is None:
            raise ValueError("no model is loaded")
        return self._loaded


def _generated(
    done: Continuation,
    lag: LoopLag,
    landed_s: tuple[float, ...] = (),
    attempt: int = 1,
    matched_tokens: int = 0,
) -> Generated:
    return Generated(
        landed_s=landed_s,
        token_times_s=done.token_times_s,
        prompt_positions=done.prompt_positions,
        attempt=attempt,
        tokens=done.tokens,
        worst_lag_s=lag.worst_s,
        matched_tokens=matched_tokens,
    )


def main(find_place: Callable[[str], Place] = place_named) -> None:
    """Do what the parent asks, on the device of ``argv``, until it hangs up."""
    asyncio.run(_work(Stage(), find_place(sys.argv[1])))


async def _work(stage: Stage, place: Place) -> None:
    async with contextlib.AsyncExitStack() as stack:
        await stage.perform(DecodeWorker(stage.send, stack, place).do)


if __name__ == "__main__":
    main()
