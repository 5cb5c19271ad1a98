"""One run of the demo of the cache: engines alone, engines with a store, and a kill.

The parent sends one request at a time and has the only clock that runs are compared by.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
import urllib.parse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from asynckv.cli.demo.cache.report import (
    AFTER_THE_KILL,
    CHUNK_TOKENS,
    CacheReport,
    Request,
    Step,
    Workload,
    find_problems,
    hit_rate,
)
from asynckv.cli.demo.live import LiveDisplay
from asynckv.cli.demo.messages import (
    Answered,
    Ask,
    FirstToken,
    LoadModel,
    Ready,
    Stored,
    UseStore,
    WaitStored,
)
from asynckv.cli.demo.play import both, start_worker, this_machine
from asynckv.cli.demo.processes import Worker
from asynckv.cli.demo.report import Machine, write_seconds

__all__ = ("play_cache",)

_ENGINE: Final = "asynckv.cli.demo.cache.engine"
_SERVER: Final = "asynckv.cli.demo.cache.server"
_MEMORY_IN_DOCUMENTS: Final = 8
"""An eighth of its memory may wait for the disk: the document, which is put at once."""
_DISK_IN_DOCUMENTS: Final = 16
_LEAST_DISK_BYTES: Final = 2**26

_Engines: TypeAlias = tuple[Worker, Worker]


class _Cast:
    """Starts the processes; what they write they write into ``scratch``."""

    def __init__(
        self,
        stack: contextlib.AsyncExitStack,
        display: LiveDisplay,
        model: str,
        workload: Workload,
        scratch: Path,
    ) -> None:
        self.workload = workload
        self._start = functools.partial(start_worker, stack, display)
        self._display, self._model, self._scratch = display, model, scratch
        self._url = "tcp://127.0.0.1:0"

    async def engines(self) -> tuple[_Engines, Ready]:
        """Start two engines that have the model, and nothing stored."""
        self._display.begin("start two engines")
        one, two = await self._engine(), await self._engine()
        self._display.end(f"{one.pid} and {two.pid}")
        self._display.begin(f"load {self._model}")
        # The first one of all prepares the model.
        ready = await one.ask(LoadModel(self.workload.document), Ready)
        await two.ask(LoadModel(self.workload.document), Ready)
        self._display.end(f"{ready.model}, a document of {len(ready.prompt):,} tokens")
        return (one, two), ready

    async def engine(self) -> Worker:
        """Start one engine that has the model."""
        engine = await self._engine()
        await engine.ask(LoadModel(self.workload.document), Ready)
        return engine

    async def _engine(self) -> Worker:
        return await self._start(_ENGINE, self._model, str(self._scratch / "model"))

    async def server(self, document_bytes: int) -> tuple[Worker, str]:
        """Start the server: on the same disk, and where the last one was."""
        folder = urllib.parse.quote(str(self._scratch / "disk"))
        max_bytes = max(_LEAST_DISK_BYTES, _DISK_IN_DOCUMENTS * document_bytes)
        disk = f"disk://{folder}?max={max_bytes}"
        memory = str(_memory_bytes(document_bytes))
        server = await self._start(_SERVER, self._url, memory, disk)
        self._url = (await server.expect(Ready)).url
        return server, self._url


def _memory_bytes(document_bytes: int) -> int:
    return _MEMORY_IN_DOCUMENTS * document_bytes


class _Asking:
    """Sends requests to two engines, one at a time, and measures them."""

    def __init__(
        self, engines: _Engines, workload: Workload, display: LiveDisplay
    ) -> None:
        self._engines = engines
        self._workload = workload
        self._display = display
        self._turns: tuple[str, ...] = ()

    async def ask(self, step: Step) -> Request:
        """Ask one engine; a step of the chat goes on from all steps before."""
        is_chat = step.part == "chat"
        turns = (*self._turns, step.words) if is_chat else (step.words,)
        document = "" if is_chat else self._workload.document
        engine = self._engines[step.engine - 1]
        order = Ask(turns, step.max_new_tokens, document)
        self._display.doing(f"{step.name}, engine {step.engine}")
        sent_s = time.monotonic()
        first_s, answered = await both(
            _first_token_of(engine), engine.ask(order, Answered)
        )
        if is_chat:
            self._turns = (*turns, answered.text)
        return Request(
            part=step.part,
            name=step.name,
            engine=step.engine,
            prompt_tokens=answered.prompt_tokens,
            found_tokens=answered.found_tokens,
            computed_tokens=answered.computed_tokens,
            by_tier=answered.by_tier,
            first_token_s=first_s - sent_s,
            engine_first_token_s=answered.first_token_s,
            tokens=answered.tokens,
        )

    async def play(self, title: str) -> tuple[Request, ...]:
        """Ask everything that is asked before the kill."""
        done: list[Request] = []
        steps = self._workload.steps
        for part, several in itertools.groupby(steps, lambda step: step.part):
            self._display.begin(f"{title}: a {part}")
            asked = [await self.ask(step) for step in several]
            self._display.end(_summary(asked))
            done += asked
        return tuple(done)


async def _first_token_of(engine: Worker) -> float:
    await engine.expect(FirstToken)
    return time.monotonic()


def _summary(asked: Sequence[Request]) -> str:
    last = write_seconds(asked[-1].first_token_s)
    return f"{hit_rate(asked):.0%} of the tokens found, last first token after {last}"


async def play_cache(
    model: str, workload: Workload, scratch: Path, display: LiveDisplay
) -> CacheReport:
    """Ask engines alone, engines that share a store, and after a kill.

    Cancelled or not, no process is left behind; what they write is in ``scratch``.

    :raises WorkerFailed: a process says that it cannot do its part
    :raises WorkerEnded: a process died that should not have
    """
    machine, began_s = this_machine(), time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        cast = _Cast(stack, display, model, workload, scratch)
        alone, ready = await _play_alone(cast, display)
        report = await _play_shared(cast, display, ready, alone, machine)
    return msgspec.structs.replace(
        report,
        seconds=time.monotonic() - began_s,
        problems=tuple(find_problems(report)),
    )


async def _play_alone(
    cast: _Cast, display: LiveDisplay
) -> tuple[tuple[Request, ...], Ready]:
    engines, ready = await cast.engines()
    for engine in engines:
        own = UseStore(max_bytes=_memory_bytes(ready.kv_bytes))
        await engine.ask(own, Ready)
    alone = await _Asking(engines, cast.workload, display).play("each alone")
    for engine in engines:
        await engine.stop()
    return alone, ready


async def _play_shared(
    cast: _Cast,
    display: LiveDisplay,
    ready: Ready,
    alone: tuple[Request, ...],
    machine: Machine,
) -> CacheReport:
    engines, _ = await cast.engines()
    server, url = await cast.server(ready.kv_bytes)
    for engine in engines:
        await engine.ask(UseStore(url), Ready)
    shared = await _Asking(engines, cast.workload, display).play("with a store")
    display.begin("wait for the disk")
    stored = [await engine.ask(WaitStored("disk"), Stored) for engine in engines]
    on_disk = len({key for one in stored for key in one.keys})
    missing = len({key for one in stored for key in one.missing})
    display.end(f"it has {on_disk} blocks")
    killed = engines[1], server
    display.begin(f"kill -9: engine {killed[0].pid}, server {killed[1].pid}")
    for worker in killed:
        worker.kill()
    killed_s = time.monotonic()
    for worker in killed:
        await worker.stop()
    await cast.server(ready.kv_bytes)
    back_s = time.monotonic() - killed_s
    display.end(f"another server on the same disk after {write_seconds(back_s)}")
    restarted, cold = await _play_restarted(cast, display, engines[0], url, ready)
    return CacheReport(
        model=ready.model,
        chunk_tokens=CHUNK_TOKENS,
        block_bytes=ready.kv_bytes // (len(ready.prompt) // CHUNK_TOKENS),
        memory_bytes=_memory_bytes(ready.kv_bytes),
        alone=alone,
        shared=shared,
        restarted=restarted,
        cold=cold,
        blocks_on_disk=on_disk,
        blocks_missing=missing,
        killed_pids=(killed[0].pid, killed[1].pid),
        server_back_s=back_s,
        machine=msgspec.structs.replace(machine, torch=ready.torch),
        seconds=0.0,
    )


async def _play_restarted(
    cast: _Cast, display: LiveDisplay, survivor: Worker, url: str, ready: Ready
) -> tuple[tuple[Request, Request], Request]:
    display.begin("start an engine in place of the killed one")
    engine = await cast.engine()
    await engine.ask(UseStore(url), Ready)
    display.end(f"{engine.pid}")
    asking = _Asking((survivor, engine), cast.workload, display)
    step = Step("killed", "the new engine", 2, AFTER_THE_KILL)
    other = replace(step, name="the old engine", engine=1)
    display.begin("ask both engines about the document")
    restarted = await asking.ask(step), await asking.ask(other)
    display.end(_summary(restarted))
    display.begin("ask the new engine again, with nothing stored")
    await engine.ask(UseStore(max_bytes=_memory_bytes(ready.kv_bytes)), Ready)
    cold = await asking.ask(replace(step, name="cold"))
    display.end(f"first token after {write_seconds(cold.first_token_s)}")
    return restarted, cold
