"""Pipes between two GPUs, and within one of two processes: cancelled anywhere."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

import torch

from asynckv.pipes.endpoints import listen_pipe, open_pipe
from asynckv.testing.blocked import until
from asynckv.testing.cancellation import Outcome
from asynckv.testing.expectations import expect, expect_same, noise
from harness.cancellations.entries import (
    LARGE,
    OVERWRITE,
    expect_overwritten,
)
from harness.cancellations.grounds import Ground
from harness.cancellations.scenario import Scenario
from harness.cancellations.sweeper import Sweeper, ticks
from harness.fake_devices import (
    calls_of_cuda,
    fake_device_of,
    faultless_gpus,
)
from harness.fake_gpus import FakeGpus
from harness.gpu_pipe_pairs import GpuPipes
from harness.ipc_pipe_pairs import open_ipc_pipes
from harness.nccl_pipe_pairs import open_nccl_pipes

__all__ = ("PIPING_ON_GPUS", "Way", "a_flush", "a_pipe", "a_receive", "a_send")


@dataclasses.dataclass(frozen=True)
class Way:
    """How tensors of a pipe go, and which GPU the listener is on."""

    transport: str
    where: str
    listens_on: int
    open_pair: Callable[[FakeGpus], contextlib.AbstractAsyncContextManager[GpuPipes]]


_WAYS: Final = (
    Way("nccl", "between_gpus", 1, open_nccl_pipes),
    Way("cuda_ipc", "within_a_gpu", 0, open_ipc_pipes),
)


async def a_pipe(way: Way, ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Goes on alone wherever its opening ends, and leaves nothing on either GPU.

    No memory of the peer's stays open.
    """
    with faultless_gpus(2) as gpus:
        ours = fake_device_of(gpus.process())
        theirs = fake_device_of(gpus.process(), way.listens_on)

        async def use() -> None:
            async with (
                listen_pipe(
                    "tcp://127.0.0.1:0", device=theirs.device, max_bytes="1MiB"
                ) as listener,
                open_pipe(listener.url, device=ours.device, max_bytes="1MiB") as near,
                await listener.accept() as far,
            ):
                await ticks(8)
                await near.gpus_settled()
                await far.gpus_settled()
                expect(near.transport == way.transport, "no way was opened")

        def is_quiet() -> bool:
            left = [*ours.process.owned, *theirs.process.owned]
            opened = len(ours.process.cuda._opened) + len(theirs.process.cuda._opened)
            return not opened and not any(one.array.nbytes > 1 for one in left)

        async def check(outcome: Outcome[None]) -> None:
            await until(lambda: not calls_of_cuda())
            gc.collect()
            await until(is_quiet)

        await sweeper.sweep(f"a pipe by {way.transport}", use, check)
    await ground.check_quiet()


async def a_send(way: Way, ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Has sent nothing, or all; the tensor is not read any more."""
    with faultless_gpus(2, max_delay=2) as gpus:
        async with way.open_pair(gpus) as pair:
            source = pair.ours.tensor(noise(nbytes, 1))

            async def before() -> None:
                source.as_subclass(torch.Tensor).copy_(noise(nbytes, 1))

            async def check(outcome: Outcome[None]) -> None:
                source.fill_(OVERWRITE)
                await pair.near.send_tensor(None)
                if not outcome.cancelled:
                    expect_same(await pair.far.recv_tensor(), noise(nbytes, 1))
                found = await pair.far.recv_tensor()
                expect(found is None, "a cancelled send has sent")
                await pair.near.flush()
                await _is_empty(pair)

            await sweeper.sweep(
                f"a send of {nbytes} bytes by {way.transport}",
                lambda: pair.near.send_tensor(source),
                check,
                before,
            )
            expect(pair.moved > 0, "nothing has gone from GPU to GPU")
    await ground.check_quiet()


async def a_receive(way: Way, ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Has taken nothing; memory of the caller's is quiet when the call has ended."""
    with faultless_gpus(2, max_delay=2) as gpus:
        async with way.open_pair(gpus) as pair:
            into = pair.theirs.tensor(torch.zeros(nbytes, dtype=torch.uint8))
            source = pair.ours.tensor(noise(nbytes, 1))

            async def receive() -> None:
                expect_same(await pair.far.recv_tensor(into), noise(nbytes, 1))

            async def check(outcome: Outcome[None]) -> None:
                into.fill_(OVERWRITE)
                if outcome.cancelled:
                    expect_same(await pair.far.recv_tensor(), noise(nbytes, 1))
                await pair.near.flush()
                await _is_empty(pair)
                expect_overwritten(into)

            await sweeper.sweep(
                f"a receive of {nbytes} bytes by {way.transport}",
                receive,
                check,
                lambda: pair.near.send_tensor(source),
            )
            expect(pair.moved > 0, "nothing has gone from GPU to GPU")
    await ground.check_quiet()


async def a_flush(way: Way, ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Leaves no trace, and what was sent arrives."""
    with faultless_gpus(2, max_delay=2) as gpus:
        async with way.open_pair(gpus) as pair:
            source = pair.ours.tensor(noise(nbytes, 1))

            async def check(outcome: Outcome[None]) -> None:
                await pair.near.flush()
                expect_same(await pair.far.recv_tensor(), noise(nbytes, 1))
                await _is_empty(pair)

            await sweeper.sweep(
                f"a flush of {nbytes} bytes by {way.transport}",
                pair.near.flush,
                check,
                lambda: pair.near.send_tensor(source),
            )
    await ground.check_quiet()


async def _is_empty(pair: GpuPipes) -> None:
    """Nothing is held by either side, nor by its GPU."""
    expect(not pair.far.statistics().held_tensors, "it was received twice")
    await until(lambda: not pair.near.statistics().in_flight_bytes)
    await until(lambda: not pair.used_bytes)
    expect(pair.near.transport in ("nccl", "cuda_ipc"), "the way was lost")


def _scenarios(
    run: Callable[[Way, Ground, Sweeper, int], Awaitable[None]],
    *covers: str,
    nbytes: int = LARGE,
) -> Iterator[Scenario]:
    """Yield what is swept each way."""
    for way in _WAYS:
        yield Scenario(
            *(functools.partial(run, way), covers, ("local",), (nbytes,)),
            is_costly=True,
            label=f"{run.__name__}_{way.where}",
        )


PIPING_ON_GPUS: Final = (
    *_scenarios(
        *(a_pipe, "open_pipe", "PipeListener.__aenter__", "Pipe.gpus_settled"),
        nbytes=0,
    ),
    *_scenarios(a_send, "KVPipe.send_tensor"),
    *_scenarios(a_receive, "KVPipe.recv_tensor"),
    *_scenarios(a_flush, "KVPipe.flush"),
)
