"""An engine process: answers requests, from the KV of a store as far as it is there.

Alone it has a store of its own in its memory: the prefix cache that engines have.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

import asynckv
from asynckv.abc import KVStoreBuffer
from asynckv.cli.demo.cache.report import CHUNK_TOKENS
from asynckv.cli.demo.messages import (
    Answered,
    Ask,
    Doing,
    FirstToken,
    LoadModel,
    Note,
    Order,
    Ready,
    Stored,
    UseStore,
    WaitStored,
)
from asynckv.cli.demo.models import (
    PreparedModel,
    PromptTokenizer,
    load_model,
    loading,
    prepare_model,
)
from asynckv.cli.demo.worker import Engine, Stage, TokenClock
from asynckv.connectors import prefix_block_keys
from asynckv.integrations.transformers import (
    Handoff,
    continue_from,
    fingerprint_of,
    load_prefix,
    plan_layers,
    store_prefix,
)

__all__ = ("CacheEngine", "main")

_WARM_UP_TOKENS: Final = 250
_RECONNECT_S: Final = 120.0
_POLL_S: Final = 0.02


class CacheEngine:
    """Carries out the parent's orders, one at a time."""

    def __init__(
        self,
        send: Callable[[Note], None],
        stack: contextlib.AsyncExitStack,
        model: str,
        scratch: Path,
    ) -> None:
        self._send, self._stack = send, stack
        self._model, self._scratch = model, scratch
        self._loaded: tuple[Engine, PromptTokenizer] | None = None
        self._store: KVStoreBuffer | None = None
        self._keys: dict[str, None] = {}

    async def do(self, order: Order) -> Note:
        """Carry out one order."""
        match order:
            case LoadModel():
                return await self._load(order.document)
            case UseStore():
                return await self._use(order)
            case Ask():
                return await self._answer(order)
            case WaitStored():
                return await self._wait_stored(order.tier, order.within_s)
        raise ValueError(f"an engine does not know {type(order).__name__}")

    def use(self, engine: Engine, tokenizer: PromptTokenizer) -> None:
        """Compute with this model from here on."""
        self._loaded = engine, tokenizer

    async def _load(self, document: str) -> Ready:
        def doing(what: str) -> None:
            self._send(Doing(what))

        # Nothing else happens on this loop yet.
        with loading():
            prepared = prepare_model(self._model, self._scratch, doing)
            model = load_model(prepared.folder, on_progress=doing)
            engine = Engine(model, tuple(range(_WARM_UP_TOKENS)))
        self._stack.callback(engine.close)
        doing("warming up")
        await engine.compute(lambda: engine.generate(TokenClock(), 2))
        self.use(engine, prepared.tokenizer)
        return _ready(prepared, engine, document)

    async def _use(self, order: UseStore) -> Ready:
        engine, _ = self._engine()
        fingerprint = fingerprint_of(engine.model)
        if order.url:
            peer = asynckv.connect(
                order.url, fingerprint=fingerprint, reconnect_s=_RECONNECT_S
            )
            self._store = (await self._stack.enter_async_context(peer)).store
        else:
            own = asynckv.StoreBuffer(order.max_bytes, fingerprint=fingerprint)
            self._store = await self._stack.enter_async_context(own)
        return Ready(pid=os.getpid())

    async def _answer(self, order: Ask) -> Answered:
        asked_s = time.monotonic()
        loaded, tokenizer = self._engine()
        prompt = tokenizer.encode_chat(order.turns, order.document)
        engine, store = loaded.for_prompt(tuple(prompt)), self._used()
        keys = prefix_block_keys(prompt, CHUNK_TOKENS, fingerprint_of(engine.model))
        found = await store.match_prefix(keys)
        with engine.recording(self._send_first) as recording:
            handoff = await load_prefix(
                engine.model, engine.prompt, store, chunk_tokens=CHUNK_TOKENS
            )
            output = await _generate(
                engine, handoff, recording.clock, order.max_new_tokens
            )
        done = engine.continuation(recording, output.sequences)
        await store_prefix(
            engine.model,
            output.sequences,
            output.past_key_values,
            store,
            chunk_tokens=CHUNK_TOKENS,
        )
        self._keys |= dict.fromkeys(keys)
        return Answered(
            prompt_tokens=len(prompt),
            found_tokens=0 if handoff is None else handoff.length,
            computed_tokens=done.prompt_positions,
            by_tier=dict(found.by_tier),
            first_token_s=done.token_times_s[0] - asked_s,
            tokens=done.tokens,
            text=tokenizer.decode(list(done.tokens)),
        )

    def _send_first(self, tokens: int) -> None:
        if tokens == 1:
            self._send(FirstToken())

    async def _wait_stored(self, tier: str, within_s: float) -> Stored:
        store, missing = self._used(), set(self._keys)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                # A store tells nobody that a tier has a value, so it is asked.
                while missing:
                    for key in tuple(missing):
                        if tier in await _tiers_of(store, key):
                            missing.remove(key)
                    await asyncio.sleep(_POLL_S)
        return Stored(tuple(self._keys.keys() - missing), tuple(missing))

    def _engine(self) -> tuple[Engine, PromptTokenizer]:
        if self._loaded is None:
            raise ValueError("no model is loaded")
        return self._loaded

    def _used(self) -> KVStoreBuffer:
        if self._store is None:
            raise ValueError("there is no store")
        return self._store


async def _tiers_of(store: KVStoreBuffer, key: str) -> tuple[str, ...]:
    stored = await store.stat(key)
    return () if stored is None else stored.tiers


async def _generate(
    engine: Engine, handoff: Handoff | None, clock: TokenClock, max_new_tokens: int
) -> Any:
    """Go on from what was found, or from nothing, and return what the KV is in, too."""
    if handoff is None:
        return await engine.compute(
            lambda: engine.generate(clock, max_new_tokens, return_dict_in_generate=True)
        )
    generated = await continue_from(
        handoff,
        use_carried=False,
        return_dict_in_generate=True,
        **engine.options(clock, max_new_tokens),
    )
    return generated.output


def _ready(prepared: PreparedModel, engine: Engine, document: str) -> Ready:
    prompt = prepared.tokenizer.encode_chat(("",), document)
    specs = [
        spec
        for plan in plan_layers(engine.model.config)
        for spec in plan.specs(1, CHUNK_TOKENS, engine.model.dtype).values()
    ]
    return Ready(
        pid=os.getpid(),
        model=prepared.name,
        prompt=tuple(prompt),
        kv_bytes=sum(spec.nbytes for spec in specs) * (len(prompt) // CHUNK_TOKENS),
        torch=str(torch.__version__),
    )


def main() -> None:
    """Do what the parent asks, with the model and the folder of ``argv``."""
    asyncio.run(_work(Stage(), sys.argv[1], Path(sys.argv[2])))


async def _work(stage: Stage, model: str, scratch: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        await stage.perform(CacheEngine(stage.send, stack, model, scratch).do)


if __name__ == "__main__":
    main()
