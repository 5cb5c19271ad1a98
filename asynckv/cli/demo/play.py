"""One run of the demo: two processes are started, the acts are played, nothing is left.

In each act the parent asks something of its processes, and makes figures of what they
have noted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import platform
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from asynckv import __version__
from asynckv.cli.demo.live import LiveDisplay
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
    DemoReport,
    HandOver,
    LayerTrace,
    Machine,
    Recompute,
    SecondRequest,
    Survival,
    write_bytes,
    write_seconds,
    write_tail,
)
from asynckv.cli.process import describe_host
from asynckv.waits.waiting import PlainTaskGroup

__all__ = (
    "ActFailed",
    "Acts",
    "Programs",
    "account_backpressure",
    "account_hand_over",
    "both",
    "find_problems",
    "play_demo",
    "start_worker",
    "this_machine",
)


def account_hand_over(
    title: str, asked_s: float, prefilled: Prefilled, generated: Generated
) -> HandOver:
    """Join both sides' notes of one hand-over, counted from ``asked_s``."""
    sides = zip(prefilled.spans, prefilled.handed_s, generated.landed_s, strict=True)
    return HandOver(
        title=title,
        prefill_s=prefilled.ended_s - asked_s,
        landed_s=max(generated.landed_s) - asked_s,
        first_token_s=generated.token_times_s[0] - asked_s,
        prompt_positions=generated.prompt_positions,
        attempt=generated.attempt,
        tokens=generated.tokens,
        layers=tuple(
            LayerTrace(
                name=f"layers.{index}",
                compute_start_s=start_s - asked_s,
                compute_end_s=end_s - asked_s,
                handed_s=handed_s - asked_s,
                landed_s=landed_s - asked_s,
            )
            for index, ((start_s, end_s), handed_s, landed_s) in enumerate(sides)
        ),
    )


def account_backpressure(
    filled: Filled, *, entry_bytes: int, max_bytes: int
) -> BackpressureReport:
    """Judge memory by the samples from the first insert that waited to the last."""
    waiting = [sample for sample in filled.samples if sample.waiting]
    resident = [sample.resident_bytes for sample in waiting] or [0]
    return BackpressureReport(
        entries=len(filled.waits_s),
        entry_bytes=entry_bytes,
        max_bytes=max_bytes,
        longest_wait_s=max(filled.waits_s),
        peak_bytes=max((sample.buffered_bytes for sample in filled.samples), default=0),
        resident_growth_bytes=max(resident) - resident[0],
        worst_lag_s=filled.worst_lag_s,
        samples=filled.samples,
    )


def find_problems(report: DemoReport) -> Iterable[str]:
    """Yield everything in which the run did not keep what the demo promises."""
    expected = report.recompute.tokens
    survival, slow = report.survival, report.backpressure
    for hand_over in (report.bulk, report.layerwise, survival.taken_over):
        if hand_over.tokens != expected:
            yield f"{hand_over.title}: the tokens differ from the recomputed ones"
        if hand_over.prompt_positions != 1:
            positions = hand_over.prompt_positions
            yield f"{hand_over.title}: the decoder computed {positions} positions"
    second = report.second
    if second.tokens != second.recomputed.tokens:
        yield "Second request: the tokens differ from the recomputed ones"
    if second.prompt_positions != second.prompt_tokens - second.matched_tokens:
        positions = second.prompt_positions
        yield f"Second request: the decoder computed {positions} positions"
    if report.recompute.prompt_positions != report.prompt_tokens:
        yield "Recompute: the decoder did not compute the whole prompt"
    if slow.peak_bytes > slow.max_bytes:
        yield "Slow decoder: the buffer held more than max_bytes"
    if slow.longest_wait_s <= 0.0:
        yield "Slow decoder: no insert had to wait"
    if survival.landed_before >= len(survival.taken_over.layers):
        yield "Killed decoder: the transfer was over before it died"
    if survival.taken_over.attempt < 2:
        yield "Killed decoder: its successor's delivery counts as the first one"


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

    async def recompute(
        self, decode: Worker, *, second: bool = False, first_only: bool = False
    ) -> Recompute:
        """Act 1: the decoder computes the prompt itself, or the ``second`` one."""
        asked_s = self._clock()
        done = await decode.ask(Continue(second, first_only), Generated)
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
        prefilled, generated = await both(
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
        recomputed = await self.recompute(decode, second=True)
        entry_id = "demo-document"
        order = Prefill("layerwise", entry_id, document_only=True)
        await self._prefill.ask(order, Prefilled)
        asked_s = self._clock()
        done = await decode.ask(Select("layerwise", entry_id, second=True), Generated)
        self._note_lag(decode_s=done.worst_lag_s)
        if not done.matched_tokens:
            raise ActFailed("the document's KV was not found")
        again = await self.recompute(decode, second=True, first_only=True)
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
        filled, selected = await both(
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
        prefilled, kept = await both(
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


async def both(
    first: Coroutine[Any, Any, _A], second: Coroutine[Any, Any, _B]
) -> tuple[_A, _B]:
    """Wait for both; if one fails the other is cancelled and its error is raised."""
    async with PlainTaskGroup() as group:
        one, other = group.create_task(first), group.create_task(second)
    return one.result(), other.result()


@dataclasses.dataclass(frozen=True)
class Programs:
    """The modules that the processes run."""

    prefill: str = "asynckv.cli.demo.prefill"
    decode: str = "asynckv.cli.demo.decode"


async def play_demo(
    model: str,
    scratch: Path,
    display: LiveDisplay,
    *,
    device: str = "cpu",
    programs: Programs = Programs(),
) -> DemoReport:
    """Play all six acts with ``model`` and the prompt in ``scratch/prompt``.

    Both processes compute on ``device``, and have their buffers there.

    Cancelled or not, no process is left behind; what the processes write they
    write into ``scratch``.

    :raises WorkerFailed: a process says that it cannot do its part
    :raises WorkerEnded: a process died that should not have
    :raises ActFailed: an act did not show what it is there to show
    """
    machine = this_machine()
    began_s = time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        start = functools.partial(start_worker, stack, display)
        display.begin("start two processes")
        prefill = await start(programs.prefill, model, str(scratch), device)
        start_decoder = functools.partial(start, programs.decode, device)
        decode = await start_decoder()
        display.end(f"{prefill.pid} will prefill, {decode.pid} will decode")
        display.begin(f"load {model} in the prefill process")
        display.doing("importing torch and transformers")
        ready = await prefill.expect(Ready)
        display.end(f"{ready.model}, {len(ready.prompt):,} prompt tokens")
        report = await _play(
            prefill, decode, ready, start_decoder, display, machine=machine
        )
    return msgspec.structs.replace(
        report,
        seconds=time.monotonic() - began_s,
        problems=tuple(find_problems(report)),
    )


def this_machine() -> Machine:
    """Return what runs here and where, torch's version still unknown."""
    return Machine(
        version=__version__,
        began=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        host=describe_host(),
        python=platform.python_version(),
        torch="",  # only the other processes import it, and say
    )


async def start_worker(
    stack: contextlib.AsyncExitStack,
    display: LiveDisplay,
    module: str,
    *arguments: str,
) -> Worker:
    """Start a process, which is stopped when ``stack`` is left."""
    worker = await Worker.start(module, *arguments, progress=display.note)
    stack.push_async_callback(worker.stop)
    return worker


async def _play(
    prefill: Worker,
    decode: Worker,
    ready: Ready,
    start_decoder: Callable[[], Awaitable[Worker]],
    display: LiveDisplay,
    *,
    machine: Machine,
) -> DemoReport:
    acts = Acts(prefill, ready)
    display.expect_layers(ready.layers)
    display.begin("load it in the decode process")
    display.doing("importing torch and transformers")
    connected = await acts.load(decode)
    display.end("connected to the prefill process, and warm")
    recompute, bulk, layerwise, second = await _play_requests(acts, decode, display)
    slow = await _play_slow_decoder(acts, decode, display)
    survival = await _play_death(acts, decode, start_decoder, display, ready.layers)
    return DemoReport(
        model=ready.model,
        prompt_tokens=len(ready.prompt),
        kv_bytes=ready.kv_bytes,
        prefill_pid=prefill.pid,
        decode_pid=decode.pid,
        transport=connected.transport,
        device=ready.device,
        recompute=recompute,
        bulk=bulk,
        layerwise=layerwise,
        second=second,
        backpressure=slow,
        survival=survival,
        prefill_lag_s=acts.prefill_lag_s,
        decode_lag_s=acts.decode_lag_s,
        text=await acts.read_back(recompute.tokens),
        machine=msgspec.structs.replace(machine, torch=ready.torch),
        seconds=0.0,
    )


async def _play_requests(
    acts: Acts, decode: Worker, display: LiveDisplay
) -> tuple[Recompute, HandOver, HandOver, SecondRequest]:
    display.begin("1  recompute in the decoder")
    recompute = await acts.recompute(decode)
    display.end(
        f"first token {write_seconds(recompute.first_token_s)} after the request"
    )
    display.begin("2  KV in bulk")
    bulk = await acts.hand_over(decode, "bulk")
    display.end(_words(bulk))
    display.begin("3  KV layer by layer")
    layerwise = await acts.hand_over(decode, "layerwise")
    display.end(_words(layerwise))
    display.begin("4  second request, KV kept")
    second = await acts.second_request(decode)
    display.end(
        f"first token {write_seconds(second.first_token_s)} after the request, "
        f"{write_seconds(second.recomputed.first_token_s)} without the kept KV"
    )
    return recompute, bulk, layerwise, second


async def _play_slow_decoder(
    acts: Acts, decode: Worker, display: LiveDisplay
) -> BackpressureReport:
    display.begin("5  slow decoder")
    slow = await acts.slow_decoder(decode)
    growth = write_bytes(slow.resident_growth_bytes)
    waited, room = write_seconds(slow.longest_wait_s), write_bytes(slow.max_bytes)
    display.end(f"insert waited {waited} at {room}, memory +{growth}")
    return slow


async def _play_death(
    acts: Acts,
    decode: Worker,
    start_decoder: Callable[[], Awaitable[Worker]],
    display: LiveDisplay,
    layers: int,
) -> Survival:
    display.begin("start a decode process to take over")
    successor = await start_decoder()
    display.doing(f"{successor.pid}: importing torch and transformers")
    await acts.load(successor, warm_up=False)
    display.end(f"{successor.pid} stands by")
    display.begin(f"6  decoder {decode.pid} killed in mid-transfer")
    survival = await acts.kill_decoder(decode, successor)
    display.end(
        f"dead after {survival.landed_before} of {layers} layers, "
        f"{successor.pid} took the entry"
    )
    return survival


def _words(one: HandOver) -> str:
    first = f"first token {write_seconds(one.first_token_s)} after the request"
    return f"{first}; {write_tail(one)}"
