"""1 GiB as 64 tensors of 16 MiB through a pipe, beside raw streams and ``memcpy``.

Over loopback from another process, with ``into=``. By one lane: sent from a copy, as by
default, and from where the tensors lie, ``copy=False``; with digests and without,
beside one blocking TCP stream. By memory that both map, with the digests ``edges`` and
``full``, beside ``memcpy``, the raw stream and the pipe by one lane. Paired runs, each
divided by its own A/A; with ``--ticks`` the loop's lag beside the receiving, too.

    python -m benchmarks.piping [--runs 9] [--ticks 1000] [--only NAME] [--only-report]
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Sequence
from typing import Final

import torch

import asynckv
from asynckv.cli.bench.cases import tick_beside
from asynckv.cli.bench.report import Settings, percentile
from asynckv.cli.bench.rig import Rig, copy_all
from asynckv.cli.bench.rounds import Measurement, Sample
from asynckv.cli.process import run
from asynckv.links.options import Digest
from asynckv.pipes.endpoints import PipeListener
from asynckv.pipes.pipe import Pipe
from asynckv.tensors.views import bytes_of
from benchmarks.pairing.processes import INLINE, cpu_s_of, own_process, own_rig
from benchmarks.pairing.runs import Figure, arguments_of, measure_runs, report

__all__ = ("main",)

_NBYTES, _TENSORS, _PLACES = 16 * 2**20, 64, 16
"""16 places of either side are used in turn: no cache holds them."""
_RAW: Final = "one raw stream"


@dataclasses.dataclass(frozen=True)
class Way:
    """One way through a pipe, and the least of one raw stream that is wanted."""

    digest: Digest
    is_copied: bool = True
    at_least: float | None = None
    query: str = INLINE


WAYS: Final = {
    "copied-full": Way("full", at_least=0.7),
    "copied-off": Way("off", at_least=0.7),
    "in-place-full": Way("full", is_copied=False, at_least=0.85),
    "in-place-off": Way("off", is_copied=False, at_least=0.9),
    "map-edges": Way("edges", query=""),
    "map-full": Way("full", query=""),
}


def _layers() -> list[torch.Tensor]:
    return [torch.full((_NBYTES,), one, dtype=torch.uint8) for one in range(_PLACES)]


@contextlib.asynccontextmanager
async def _sending(names: Sequence[str]) -> AsyncIterator[str]:
    """In another process: send by a pipe of each way, whenever it is asked to."""
    layers = _layers()
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for way in map(WAYS.__getitem__, names):
            listener = await stack.enter_async_context(
                asynckv.listen_pipe(
                    f"tcp://127.0.0.1:0{way.query}", digest=way.digest, lanes=1
                )
            )
            sending = _send(listener, layers, is_copied=way.is_copied)
            task = asyncio.create_task(sending)
            stack.callback(task.cancel)
            urls.append(listener.url)
        yield " ".join(urls)


async def _send(
    listener: PipeListener, layers: Sequence[torch.Tensor], *, is_copied: bool
) -> None:
    async with await listener.accept() as pipe:
        async for _ in pipe:
            for number in range(_TENSORS):
                await pipe.send_tensor(layers[number % _PLACES], copy=is_copied)
            await pipe.flush()


class Receiver:
    """Receives all tensors into memory that is there, by any of the pipes."""

    def __init__(self) -> None:
        self._targets = _layers()
        self.views = [bytes_of(self._targets[n % _PLACES]) for n in range(_TENSORS)]

    async def receive(self, pipe: Pipe) -> Sample:
        """Ask for them; they count until the last one is there."""
        began_s = time.perf_counter()
        await pipe.send_tensor(torch.ones(1))
        for number in range(_TENSORS):
            await pipe.recv_tensor(into=self._targets[number % _PLACES])
        elapsed_s = time.perf_counter() - began_s
        if any(int(one[-1]) != number for number, one in enumerate(self._targets)):
            raise SystemExit("wrong bytes in some tensor")
        return _sample(elapsed_s)


def _sample(elapsed_s: float) -> Sample:
    return Sample(_TENSORS * _NBYTES / elapsed_s / 1e9, _TENSORS * _NBYTES)


async def _measure_all(names: Sequence[str], runs: int, ticks: int) -> list[Figure]:
    figures, receiver = list[Figure](), Receiver()
    opened = list(
        dict.fromkeys(["copied-full", *names])
    )  # the first one is beside those by memory
    async with contextlib.AsyncExitStack() as stack:
        rig, _ = await stack.enter_async_context(own_rig(Settings(lanes=1)))
        served = functools.partial(_sending, opened)
        there = await stack.enter_async_context(own_process(served))

        async def cpu_s() -> float:
            return await rig.cpu_s() + cpu_s_of(there.pid)

        pipes = {}
        for name, url in zip(opened, there.address.split(), strict=True):
            pipe = asynckv.open_pipe(url, digest=WAYS[name].digest, lanes=1)
            pipes[name] = await stack.enter_async_context(pipe)
        for name in names:
            receive = functools.partial(receiver.receive, pipes[name])
            beside = _beside(rig, receiver)
            if not WAYS[name].query:
                beside["one lane"] = lambda: receiver.receive(pipes["copied-full"])
            else:
                del beside["memcpy"]
            title = f"1 GiB by a pipe, {name}, GB/s"
            found = await measure_runs(
                title, receive, beside, cpu_s, runs=runs, rounds=2
            )
            for other, of in found.items():
                at_least = WAYS[name].at_least if other == _RAW else None
                figures.append(Figure(f"{name} / {other}", of.figure, at_least))
            if ticks:
                lags_ms, _ = await tick_beside(ticks, receive)
                what, p99_ms = f"{name}: loop lag p99, ms", percentile(lags_ms, 0.99)
                figures.append(Figure(what, p99_ms))
    return figures


def _beside(rig: Rig, receiver: Receiver) -> dict[str, Measurement]:
    sources = [bytes_of(layer) for layer in _layers()] * (_TENSORS // _PLACES)

    async def raw() -> Sample:
        return _sample(await rig.in_thread(rig.baselines.raw.pull, receiver.views))

    async def memcpy() -> Sample:
        return _sample(await rig.in_thread(copy_all, receiver.views, sources))

    return {_RAW: raw, "memcpy": memcpy}


def main() -> None:
    """Measure, print, and exit 1 where a limit is missed."""
    given = arguments_of(__doc__, WAYS, runs=9, ticks=0).parse_args()
    report(run(_measure_all(given.only, given.runs, given.ticks)), given)


if __name__ == "__main__":
    main()
