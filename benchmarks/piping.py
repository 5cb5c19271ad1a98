"""1 GiB as 64 tensors of 16 MiB through a pipe of one lane, beside one raw stream.

Over loopback from another process, with ``into=``: sent from a copy, as by default, and
from where the tensors lie, ``copy=False``; with digests and without. Paired runs beside
one blocking TCP stream, each divided by its own A/A.

    python -m benchmarks.piping [--runs 9] [--only-report]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch

import asynckv
from asynckv.cli.bench.baselines import BaselineServer, Meeting, RawStreams
from asynckv.cli.bench.rounds import Measurement, Sample
from asynckv.cli.process import run
from asynckv.links.options import Digest
from asynckv.pipes.endpoints import PipeListener
from asynckv.pipes.pipe import Pipe
from asynckv.tensors.views import bytes_of
from benchmarks.pairing.runs import Figure, measure_runs, report

__all__ = ("main",)

_NBYTES, _TENSORS, _PLACES = 16 * 2**20, 64, 16
"""16 places of either side are used in turn: no cache holds them."""

_CASES: dict[str, tuple[bool, Digest, float]] = {
    "copied, digests": (True, "full", 0.7),
    "copied, digests off": (True, "off", 0.7),
    "copy=False, digests": (False, "full", 0.85),
    "copy=False, digests off": (False, "off", 0.9),
}
"""Copy, digest, and the least of one raw stream that is wanted."""


def _layers() -> list[torch.Tensor]:
    return [torch.full((_NBYTES,), one, dtype=torch.uint8) for one in range(_PLACES)]


@contextlib.contextmanager
def _sender() -> Iterator[tuple[dict[Digest, str], Meeting]]:
    """Run the other process: pipes by digest, and where the raw stream is."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_run, args=(there,), daemon=True)
    process.start()
    there.close()
    try:
        yield here.recv()
    finally:
        here.close()
        process.join(10)
        process.kill()
        process.join()


def _run(told: Connection) -> None:
    run(_send(told))
    os._exit(0)  # the raw stream's threads may hold the last of torch's memory


async def _send(told: Connection) -> None:
    layers = _layers()
    raw = BaselineServer("127.0.0.1", [bytes_of(layer) for layer in layers])
    async with contextlib.AsyncExitStack() as stack:
        meeting = await stack.enter_async_context(raw)
        urls: dict[Digest, str] = {}
        digests: tuple[Digest, ...] = ("full", "off")
        for digest in digests:
            listener = asynckv.listen_pipe(
                "tcp://127.0.0.1:0?payload=inline", digest=digest, lanes=1
            )
            await stack.enter_async_context(listener)
            task = asyncio.create_task(_send_forever(listener, layers))
            stack.callback(task.cancel)
            urls[digest] = listener.url
        told.send((urls, meeting))
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        loop.add_reader(told, over.set_result, None)
        await over
        loop.remove_reader(told)


async def _send_forever(listener: PipeListener, layers: list[torch.Tensor]) -> None:
    """Send all tensors whenever one comes, which says whether they are copied."""
    async with await listener.accept() as pipe:
        async for order in pipe:
            is_copied = order is not None and bool(order)
            for number in range(_TENSORS):
                await pipe.send_tensor(layers[number % _PLACES], copy=is_copied)
            await pipe.flush()


async def _measure(runs: int) -> list[Figure]:
    targets = _layers()
    views = [bytes_of(targets[number % _PLACES]) for number in range(_TENSORS)]
    figures = []
    with _sender() as (urls, meeting):
        raw = RawStreams("127.0.0.1", meeting)

        async def pull() -> Sample:
            elapsed_s = await asyncio.to_thread(raw.pull, views)
            return Sample(_TENSORS * _NBYTES / elapsed_s / 1e9, _TENSORS * _NBYTES)

        async def cpu_s() -> float:
            return await asyncio.to_thread(raw.cpu_s) + time.process_time()

        async with contextlib.AsyncExitStack() as stack:
            pipes = {
                digest: await stack.enter_async_context(
                    asynckv.open_pipe(url, digest=digest, lanes=1)
                )
                for digest, url in urls.items()
            }
            for name, (is_copied, digest, at_least) in _CASES.items():
                receive = _receiving(pipes[digest], targets, is_copied=is_copied)
                title = f"1 GiB by a pipe, {name}, GB/s"
                found = await measure_runs(
                    title, receive, pull, cpu_s, runs=runs, rounds=2
                )
                what = f"1 GiB by a pipe, {name} / one raw stream"
                figures.append(Figure(what, found.figure, at_least=at_least))
        raw.close()
    return figures


def _receiving(
    pipe: Pipe, targets: list[torch.Tensor], *, is_copied: bool
) -> Measurement:
    async def receive() -> Sample:
        began_s = time.perf_counter()
        await pipe.send_tensor(torch.tensor(is_copied))
        for number in range(_TENSORS):
            await pipe.recv_tensor(into=targets[number % _PLACES])
        elapsed_s = time.perf_counter() - began_s
        if any(int(one[-1]) != number for number, one in enumerate(targets)):
            raise SystemExit("wrong bytes in some tensor")
        return Sample(_TENSORS * _NBYTES / elapsed_s / 1e9, _TENSORS * _NBYTES)

    return receive


def main() -> None:
    """Measure, print, and exit 1 where a limit is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--only-report", action="store_true")
    given = parser.parse_args()
    report(run(_measure(given.runs)), only_report=given.only_report)


if __name__ == "__main__":
    main()
