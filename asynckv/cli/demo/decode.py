"""The decode process: takes KV out of the prefill's buffer and goes on from it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asynckv
from asynckv.abc import KVLookupBuffer
from asynckv.cli.demo.engine import Continuation, Engine
from asynckv.cli.demo.measurements import LoopLag, TokenClock
from asynckv.cli.demo.messages import (
    Continue,
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
from asynckv.cli.demo.models import load_model, loading
from asynckv.cli.demo.place import HOST, Place, place_named
from asynckv.cli.demo.stage import Stage
from asynckv.integrations.transformers import (
    LayerEvent,
    continue_from,
    fingerprint_of,
    generate_from,
    handoff_of,
)

__all__ = ("DecodeWorker", "main")


class DecodeWorker:
    """Carries out the parent's orders."""

    def __init__(
        self,
        tell: Callable[[Note], None],
        stack: contextlib.AsyncExitStack,
        place: Place = HOST,
    ) -> None:
        self._tell = tell
        self._stack = stack
        self._place = place
        self._loaded: tuple[Engine, KVLookupBuffer] | None = None

    async def do(self, order: Order) -> Note:
        """Carry out one order."""
        match order:
            case Load():
                return await self._load(order)
            case Continue():
                return await self._recompute()
            case Select(way="bulk"):
                return await self._select_in_bulk()
            case Select():
                return await self._select_by_layer(order.dies_after)
            case SelectSlowly():
                return await self._select_slowly(order.entries, order.pause_s)
        raise ValueError(f"a decode process does not know {type(order).__name__}")

    def use(self, engine: Engine, lookup: KVLookupBuffer) -> None:
        """Take KV out of ``lookup`` from here on."""
        self._loaded = engine, lookup

    async def _load(self, order: Load) -> Ready:
        # Nothing else happens on this loop yet.
        with loading():
            model = load_model(Path(order.folder), self._place.computes_on)
            engine = Engine(model, order.prompt, self._place)
        self._stack.callback(engine.close)
        options: dict[str, Any] = {"fingerprint": fingerprint_of(engine.model)}
        if self._place.device is not None:  # that much is allocated at once
            options |= {"device": self._place.device, "max_bytes": order.max_bytes}
        peer = await self._stack.enter_async_context(
            asynckv.connect(order.url, **options)
        )
        if order.warm_up:
            await engine.compute(lambda: engine.generate(TokenClock()))
        self.use(engine, peer.lookup)
        scheme = order.url.partition(":")[0]
        return Ready(pid=os.getpid(), transport=f"{scheme}, {peer.transport} payload")

    async def _recompute(self) -> Generated:
        engine, _ = self._ready()
        lag = LoopLag()
        began_s = time.monotonic()
        with engine.recording() as recording:
            async with lag.watch():
                sequences = await engine.compute(
                    lambda: engine.generate(recording.clock)
                )
        done = engine.continuation(recording, sequences)
        return _generated(done, lag, began_s=began_s)

    async def _select_in_bulk(self) -> Generated:
        engine, lookup = self._ready()
        lag = LoopLag()
        began_s = time.monotonic()
        with engine.recording() as recording:
            async with lag.watch():
                entry = await lookup.drop_select(engine.prompt[0])
                landed_s = time.monotonic()
                for layer in range(len(engine.layers)):
                    self._tell(Landed(layer))
                generated = await continue_from(
                    handoff_of(engine.model, entry, engine.prompt),
                    use_carried=False,
                    **engine.options(recording.clock),
                )
        done = engine.continuation(recording, generated.sequences)
        landed = (landed_s,) * len(engine.layers)
        return _generated(done, lag, began_s, landed, entry.attempt)

    async def _select_by_layer(self, dies_after: int) -> Generated:
        engine, lookup = self._ready()
        lag = LoopLag()
        landed: dict[int, float] = {}

        def note(event: LayerEvent) -> None:
            if event.what == "landed":
                landed[event.layer] = event.at
                self._tell(Landed(event.layer))
                if len(landed) == dies_after:
                    os.kill(os.getpid(), signal.SIGKILL)

        began_s = time.monotonic()
        with engine.recording() as recording:
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
        # A layer that shares another one's cache never travels.
        earliest = min(landed.values())
        times = tuple(
            landed.get(index, earliest) for index in range(len(engine.layers))
        )
        return _generated(done, lag, began_s, times, generated.attempt)

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

    def _ready(self) -> tuple[Engine, KVLookupBuffer]:
        if self._loaded is None:
            raise ValueError("no model is loaded")
        return self._loaded


def _generated(
    done: Continuation,
    lag: LoopLag,
    began_s: float,
    landed_s: tuple[float, ...] = (),
    attempt: int = 1,
) -> Generated:
    return Generated(
        began_s=began_s,
        landed_s=landed_s,
        token_times_s=done.token_times_s,
        prompt_positions=done.prompt_positions,
        attempt=attempt,
        tokens=done.tokens,
        worst_lag_s=lag.worst_s,
    )


def main(find_place: Callable[[str], Place] = place_named) -> None:
    """Do what the parent asks, on the device of ``argv``, until it hangs up."""
    asyncio.run(_work(Stage(), find_place(sys.argv[1])))


async def _work(stage: Stage, place: Place) -> None:
    async with contextlib.AsyncExitStack() as stack:
        await stage.perform(DecodeWorker(stage.tell, stack, place).do)


if __name__ == "__main__":
    main()
