"""One run of the demo: start two processes, play the acts, leave nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import platform
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from asynckv import __version__
from asynckv.cli.demo.accounting import find_problems
from asynckv.cli.demo.acts import Acts
from asynckv.cli.demo.live import LiveDisplay
from asynckv.cli.demo.messages import Ready
from asynckv.cli.demo.processes import Worker
from asynckv.cli.demo.report import (
    BackpressureReport,
    DemoReport,
    HandOver,
    Machine,
    Recompute,
    SecondRequest,
    Survival,
)
from asynckv.cli.demo.wording import write_bytes, write_seconds, write_tail
from asynckv.cli.host import describe_host

__all__ = ("Programs", "play_demo")


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
    machine = _machine()
    began_s = time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        start = functools.partial(_start, stack, display)
        display.begin("start two processes")
        prefill = await start(programs.prefill, model, str(scratch), device)
        start_decoder = functools.partial(start, programs.decode, device)
        decode = await start_decoder()
        display.end(f"{prefill.pid} will prefill, {decode.pid} will decode")
        display.begin(f"load {model} in the prefill process")
        display.doing("importing torch and transformers")
        ready = await prefill.expect(Ready)
        display.end(f"{ready.model}, {len(ready.prompt):,} prompt tokens")
        machine = msgspec.structs.replace(machine, torch=ready.torch)
        report = await _play(
            prefill, decode, ready, start_decoder, display, machine=machine
        )
    report = msgspec.structs.replace(report, seconds=time.monotonic() - began_s)
    return msgspec.structs.replace(report, problems=tuple(find_problems(report)))


def _machine() -> Machine:
    return Machine(
        version=__version__,
        began=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        host=describe_host(),
        python=platform.python_version(),
        torch="",  # only the other processes import it, and say
    )


async def _start(
    stack: contextlib.AsyncExitStack,
    display: LiveDisplay,
    module: str,
    *arguments: str,
) -> Worker:
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
        machine=machine,
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
