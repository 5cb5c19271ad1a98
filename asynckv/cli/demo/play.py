"""One run of the demo: start two processes, play the acts, leave nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from asynckv.cli.demo.accounting import find_problems
from asynckv.cli.demo.acts import Acts
from asynckv.cli.demo.live import LiveDisplay
from asynckv.cli.demo.messages import Ready
from asynckv.cli.demo.processes import Worker
from asynckv.cli.demo.report import DemoReport, HandOver
from asynckv.cli.demo.wording import write_bytes, write_seconds

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
    """Play all five acts with ``model`` and the text in ``scratch/prompt``.

    Both processes compute on ``device``, and have their buffers there.

    Cancelled or not, no process is left behind; what the processes write they
    write into ``scratch``.

    :raises WorkerFailed: a process says that it cannot do its part
    :raises WorkerEnded: a process died that should not have
    :raises ActFailed: an act did not show what it is there to show
    """
    began_s = time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        start = functools.partial(_start, stack, display)
        prefill = await start(programs.prefill, model, str(scratch), device)
        start_decoder = functools.partial(start, programs.decode, device)
        decode = await start_decoder()
        display.begin(f"load ({model}): prefill process {prefill.pid}")
        ready = await prefill.expect(Ready)
        report = await _play(prefill, decode, ready, start_decoder, display)
    report = msgspec.structs.replace(report, seconds=time.monotonic() - began_s)
    return msgspec.structs.replace(report, problems=tuple(find_problems(report)))


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
) -> DemoReport:
    acts = Acts(prefill, ready, start_decoder)
    display.expect_layers(ready.layers)
    connected = await acts.load(decode)
    display.end(f"decode process {decode.pid}, {len(ready.prompt):,} prompt tokens")
    display.begin("1  recompute in the decoder")
    recompute = await acts.recompute(decode)
    display.end(f"first token after {write_seconds(recompute.first_token_s)}")
    display.begin("2  bulk")
    bulk = await acts.hand_over(decode, "bulk")
    display.end(_words(bulk))
    display.begin("3  layer-wise")
    layerwise = await acts.hand_over(decode, "layerwise")
    display.end(_words(layerwise))
    display.begin("4  slow decoder")
    slow = await acts.slow_decoder(decode)
    growth = write_bytes(slow.resident_growth_bytes)
    waited, room = write_seconds(slow.longest_wait_s), write_bytes(slow.max_bytes)
    display.end(f"insert waited {waited} at {room}, memory +{growth}")
    display.begin("5  decoder killed in mid-transfer")
    survival, successor = await acts.kill_decoder(decode)
    display.end(
        f"killed {survival.killed_pid} after {survival.landed_before} layers, "
        f"{successor.pid} took the entry"
    )
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
        backpressure=slow,
        survival=survival,
        prefill_lag_s=acts.prefill_lag_s,
        decode_lag_s=acts.decode_lag_s,
        text=await acts.read_back(recompute.tokens),
        seconds=0.0,
    )


def _words(one: HandOver) -> str:
    first = f"first token {write_seconds(one.wait_s)} after the prefill"
    return f"{first}, tail {write_seconds(one.tail_s)}"
