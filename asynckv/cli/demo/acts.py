"""The six acts: what the parent asks of its two processes, and what it makes of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec

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
    SecondRequest,
    Survival,
)

__all__ = ("ActFailed", "Acts")

_A = TypeVar("_A")
_B = TypeVar("_B")

_SLOW_ENTRIES = 6
_PAUSE_S = 0.4
_KILL_AFTER_SHARE = 0.4
_TITLES: dict[Way, str] = {"bulk": "KV in bulk", "layerwise": "KV layer by layer"}


class ActFailed(Exception):
    """An act did not show what it is there to show."""


class Acts:
    """Plays the acts with a prefill process that is ready and a decode process.

    ``clock`` is the one that processes note their times by. Every act counts from the
    moment in which it asks them.
    """

    def __init__(
        self, prefill: Worker, ready: Ready, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.prefill_lag_s = 0.0
        self.decode_lag_s = 0.0
        self._prefill = prefill
        self._ready = ready
        self._clock = clock

    async def load(self, decode: Worker, *, warm_up: bool = True) -> Ready:
        """Let a decode process load the model and connect."""
        ready = self._ready
        order = Load(
            ready.folder,
            ready.url,
            ready.prompt,
            ready.second_prompt,
            ready.max_bytes,
            warm_up,
        )
        return await decode.ask(order, Ready)

    async def recompute(self, decode: Worker) -> Recompute:
        """Act 1: the decoder computes the prompt itself."""
        return await self._recompute(decode, Continue())

    async def _recompute(self, decode: Worker, order: Continue) -> Recompute:
        asked_s = self._clock()
        done = await decode.ask(order, Generated)
        self._note_lag(decode_s=done.worst_lag_s)
        return Recompute(
            first_token_s=done.token_times_s[0] - asked_s,
            prompt_positions=done.prompt_positions,
            tokens=done.tokens,
        )

    async def hand_over(self, decode: Worker, way: Way) -> HandOver:
        """Acts 2 and 3: the KV goes in bulk, or layer by layer."""
        entry_id = f"demo-{way}"
        asked_s = self._clock()
        prefilled, generated = await _both(
            self._prefill.ask(Prefill(way, entry_id), Prefilled),
            decode.ask(Select(way, entry_id), Generated),
        )
        return self._account(_TITLES[way], asked_s, prefilled, generated)

    async def second_request(self, decode: Worker) -> SecondRequest:
        """Act 4: another question about a document whose KV is kept.

        It is recomputed before and after, and the faster of the two counts: what else
        runs on the machine must not look like a gain.

        :raises ActFailed: the kept KV was not found
        """
        recomputed = await self._recompute(decode, Continue(second=True))
        entry_id = "demo-document"
        order = Prefill("layerwise", entry_id, document_only=True)
        await self._prefill.ask(order, Prefilled)
        asked_s = self._clock()
        done = await decode.ask(Select("layerwise", entry_id, second=True), Generated)
        self._note_lag(decode_s=done.worst_lag_s)
        if not done.matched_tokens:
            raise ActFailed("the document's KV was not found")
        again = await self._recompute(decode, Continue(second=True, first_only=True))
        fastest_s = min(recomputed.first_token_s, again.first_token_s)
        return SecondRequest(
            prompt_tokens=len(self._ready.second_prompt),
            matched_tokens=done.matched_tokens,
            prompt_positions=done.prompt_positions,
            landed_s=max(done.landed_s) - asked_s,
            first_token_s=done.token_times_s[0] - asked_s,
            tokens=done.tokens,
            recomputed=msgspec.structs.replace(recomputed, first_token_s=fastest_s),
        )

    async def slow_decoder(self, decode: Worker) -> BackpressureReport:
        """Act 5: more KV than the buffer may hold, and a decoder in no hurry.

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

    async def kill_decoder(self, decode: Worker, successor: Worker) -> Survival:
        """Act 6: SIGKILL in mid-transfer; ``successor``, loaded, takes the entry.

        :raises ActFailed: the decoder outlived the transfer, or its entry is lost
        """
        execution = _Execution(decode.progress, self._ready.layers)
        entry_id = "demo-killed"
        asked_s = self._clock()
        prefilled, kept = await _both(
            self._prefill.ask(Prefill("layerwise", entry_id), Prefilled),
            self._kill(decode, execution, entry_id),
        )
        generated = await successor.ask(Select("layerwise", entry_id), Generated)
        return Survival(
            killed_pid=decode.pid,
            landed_before=execution.landed,
            prefill_running=execution.at_s < prefilled.ended_s,
            back_after_s=kept.at_s - execution.at_s,
            successor_pid=successor.pid,
            taken_over=self._account("Taken over", asked_s, prefilled, generated),
        )

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
        self, title: str, asked_s: float, prefilled: Prefilled, generated: Generated
    ) -> HandOver:
        self._note_lag(prefilled.worst_lag_s, generated.worst_lag_s)
        return account_hand_over(title, asked_s, prefilled, generated)

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
