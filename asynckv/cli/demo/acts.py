"""The five acts: what the parent asks of its two processes, and what it makes of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from asynckv.cli.demo.accounting import account_backpressure, account_hand_over
from asynckv.cli.demo.messages import (
    Continue,
    FillBuffer,
    Filled,
    Generated,
    KeptEntry,
    Landed,
    Load,
    Prefill,
    Prefilled,
    Progress,
    ReadBack,
    Ready,
    Select,
    SelectSlowly,
    SlowlySelected,
    Text,
    WaitReturned,
    Way,
)
from asynckv.cli.demo.processes import Worker, WorkerEnded
from asynckv.cli.demo.report import (
    BackpressureReport,
    HandOver,
    Recompute,
    Survival,
)

__all__ = ("ActFailed", "Acts")

_A = TypeVar("_A")
_B = TypeVar("_B")

_SLOW_ENTRIES = 6
_PAUSE_S = 0.4
_KILL_AFTER_SHARE = 0.4
_TITLES: dict[Way, str] = {"bulk": "Bulk", "layerwise": "Layer-wise"}


class ActFailed(Exception):
    """An act did not show what it is there to show."""


class Acts:
    """Plays the acts with a prefill process that is ready and a decode process.

    ``start_decoder`` starts a decode process: the first one, and the successor
    of the one that act 5 kills.
    """

    def __init__(
        self,
        prefill: Worker,
        ready: Ready,
        start_decoder: Callable[[], Awaitable[Worker]],
    ) -> None:
        self.prefill_lag_s = 0.0
        self.decode_lag_s = 0.0
        self._prefill = prefill
        self._ready = ready
        self._start_decoder = start_decoder

    async def load(self, decode: Worker, *, warm_up: bool = True) -> Ready:
        """Let a decode process load the model and connect."""
        ready = self._ready
        order = Load(ready.folder, ready.url, ready.prompt, ready.max_bytes, warm_up)
        return await decode.ask(order, Ready)

    async def recompute(self, decode: Worker) -> Recompute:
        """Act 1: the decoder computes the prompt itself."""
        done = await decode.ask(Continue(), Generated)
        self._note_lag(decode_s=done.worst_lag_s)
        return Recompute(
            first_token_s=done.token_times_s[0] - done.began_s,
            prompt_positions=done.prompt_positions,
            tokens=done.tokens,
        )

    async def hand_over(self, decode: Worker, way: Way) -> HandOver:
        """Acts 2 and 3: the KV goes in bulk, or layer by layer."""
        entry_id = f"demo-{way}"
        prefilled, generated = await _both(
            self._prefill.ask(Prefill(way, entry_id), Prefilled),
            decode.ask(Select(way, entry_id), Generated),
        )
        return self._account(_TITLES[way], prefilled, generated)

    async def slow_decoder(self, decode: Worker) -> BackpressureReport:
        """Act 4: more KV than the buffer may hold, and a decoder in no hurry.

        :raises ActFailed: the entries did not come out in the order they went in
        """
        ids = tuple(f"demo-slow-{number}" for number in range(_SLOW_ENTRIES))
        filled, selected = await _both(
            self._prefill.ask(FillBuffer(ids), Filled),
            decode.ask(SelectSlowly(len(ids), _PAUSE_S), SlowlySelected),
        )
        if selected.entry_ids != ids:
            raise ActFailed("the entries did not come out in the order they went in")
        self._note_lag(filled.worst_lag_s, selected.worst_lag_s)
        return account_backpressure(
            filled,
            entry_bytes=self._ready.kv_bytes,
            max_bytes=self._ready.max_bytes,
        )

    async def kill_decoder(self, decode: Worker) -> tuple[Survival, Worker]:
        """Act 5: SIGKILL in mid-transfer; another process takes the entry.

        Returns the successor, too.

        :raises ActFailed: the decoder outlived the transfer, or its entry is lost
        """
        execution = _Execution(decode.progress, self._ready.layers)
        entry_id = "demo-killed"
        prefilled, kept = await _both(
            self._prefill.ask(Prefill("layerwise", entry_id), Prefilled),
            self._kill(decode, execution, entry_id),
        )
        successor = await self._start_decoder()
        await self.load(successor, warm_up=False)
        generated = await successor.ask(Select("layerwise", entry_id), Generated)
        survival = Survival(
            killed_pid=decode.pid,
            landed_before=execution.landed,
            prefill_running=execution.at_s < prefilled.ended_s,
            back_after_s=max(0.0, kept.at_s - execution.at_s),
            successor_pid=successor.pid,
            taken_over=self._account("Taken over", prefilled, generated),
        )
        return survival, successor

    async def read_back(self, tokens: tuple[int, ...]) -> str:
        """Return the text that the tokens spell."""
        return (await self._prefill.ask(ReadBack(tokens), Text)).text

    async def _kill(
        self, decode: Worker, execution: _Execution, entry_id: str
    ) -> KeptEntry:
        decode.progress = execution.note
        with contextlib.suppress(WorkerEnded):
            order = Select("layerwise", entry_id, dies_after=execution.after)
            await decode.ask(order, Generated)
        if execution.at_s == 0.0:
            raise ActFailed("the decoder was not killed in mid-transfer")
        kept = await self._prefill.ask(WaitReturned(), KeptEntry)
        if kept.matched_tokens != len(self._ready.prompt):
            raise ActFailed("the killed decoder's entry is lost")
        return kept

    def _account(
        self, title: str, prefilled: Prefilled, generated: Generated
    ) -> HandOver:
        self._note_lag(prefilled.worst_lag_s, generated.worst_lag_s)
        return account_hand_over(title, prefilled, generated)

    def _note_lag(self, prefill_s: float = 0.0, decode_s: float = 0.0) -> None:
        self.prefill_lag_s = max(self.prefill_lag_s, prefill_s)
        self.decode_lag_s = max(self.decode_lag_s, decode_s)


class _Execution:
    """The death of a decoder as soon as a share of the layers has landed in it."""

    def __init__(self, show: Callable[[Progress], None], layers: int) -> None:
        self.after = max(1, int(layers * _KILL_AFTER_SHARE))
        self.landed = 0
        self.at_s = 0.0
        self._show = show

    def note(self, progress: Progress) -> None:
        self._show(progress)
        if isinstance(progress, Landed):
            self.landed += 1
            if self.landed == self.after:
                self.at_s = time.monotonic()


async def _both(
    first: Coroutine[Any, Any, _A], second: Coroutine[Any, Any, _B]
) -> tuple[_A, _B]:
    """Wait for both; if one fails the other is cancelled and its error is raised."""
    tasks = asyncio.create_task(first), asyncio.create_task(second)
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
