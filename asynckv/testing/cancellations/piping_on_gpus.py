"""Pipes between two GPUs, and within one of two processes: cancelled anywhere."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

import torch

from asynckv.pipes.opening import listen_pipe, open_pipe
from asynckv.pipes.pipe import Pipe
from asynckv.testing.blocked import until
from asynckv.testing.cancellation import Outcome
from asynckv.testing.cancellations.entries import (
    LARGE,
    OVERWRITE,
    expect_overwritten,
)
from asynckv.testing.cancellations.grounds import Ground
from asynckv.testing.cancellations.scenario import Scenario
from asynckv.testing.cancellations.sweeper import Sweeper, ticks
from asynckv.testing.expectations import expect, expect_same, noise
from asynckv.testing.fake_devices import (
    FakeDevice,
    calls_of_cuda,
    fake_device_of,
    faultless_gpus,
)
from asynckv.testing.fake_gpus import FakeGpus
from asynckv.testing.ipc_pipe_pairs import open_ipc_pipes
from asynckv.testing.nccl_pipe_pairs import open_nccl_pipes

__all__ = (
    "PIPING_ON_GPUS",
    "a_flush_between_gpus",
    "a_flush_within_a_gpu",
    "a_pipe_between_gpus",
    "a_pipe_within_a_gpu",
    "a_receive_between_gpus",
    "a_receive_within_a_gpu",
    "a_send_between_gpus",
    "a_send_within_a_gpu",
)


class _Pipes(Protocol):
    """Both sides of a pipe, and what they have moved from GPU to GPU."""

    @property
    def near(self) -> Pipe: ...

    @property
    def far(self) -> Pipe: ...

    @property
    def ours(self) -> FakeDevice: ...

    @property
    def theirs(self) -> FakeDevice: ...

    @property
    def moved(self) -> int: ...

    @property
    def used_bytes(self) -> int: ...


_Open: TypeAlias = Callable[[FakeGpus], contextlib.AbstractAsyncContextManager[_Pipes]]


async def a_pipe_between_gpus(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Goes on alone wherever its opening ends, and leaves nothing on either GPU."""
    await _open(ground, sweeper, "nccl")


async def a_pipe_within_a_gpu(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """As between two, and no memory of the peer's stays open."""
    await _open(ground, sweeper, "cuda_ipc")


async def a_send_between_gpus(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Has sent nothing, or all; the tensor is not read any more."""
    await _send(ground, sweeper, nbytes, open_nccl_pipes)


async def a_send_within_a_gpu(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """As between two."""
    await _send(ground, sweeper, nbytes, open_ipc_pipes)


async def a_receive_between_gpus(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Has taken nothing; memory of the caller's is quiet when the call has ended."""
    await _receive(ground, sweeper, nbytes, open_nccl_pipes)


async def a_receive_within_a_gpu(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """As between two."""
    await _receive(ground, sweeper, nbytes, open_ipc_pipes)


async def a_flush_between_gpus(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Leaves no trace, and what was sent arrives."""
    await _flush(ground, sweeper, nbytes, open_nccl_pipes)


async def a_flush_within_a_gpu(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """As between two."""
    await _flush(ground, sweeper, nbytes, open_ipc_pipes)


async def _open(ground: Ground, sweeper: Sweeper, way: str) -> None:
    with faultless_gpus(2) as gpus:
        number = 1 if way == "nccl" else 0
        ours = fake_device_of(gpus.process())
        theirs = fake_device_of(gpus.process(), number)

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
                expect(near.transport == way, "no way was opened")

        def is_quiet() -> bool:
            left = [*ours.process.owned, *theirs.process.owned]
            opened = len(ours.process.cuda._opened) + len(theirs.process.cuda._opened)
            return not opened and not any(one.array.nbytes > 1 for one in left)

        async def check(outcome: Outcome[None]) -> None:
            await until(lambda: not calls_of_cuda())
            gc.collect()
            await until(is_quiet)

        await sweeper.sweep(f"a pipe by {way}", use, check)
    await ground.check_quiet()


async def _send(
    ground: Ground, sweeper: Sweeper, nbytes: int, open_pair: _Open
) -> None:
    with faultless_gpus(2, max_delay=2) as gpus:
        async with open_pair(gpus) as pair:
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
                f"a send of {nbytes} bytes by {pair.near.transport}",
                lambda: pair.near.send_tensor(source),
                check,
                before,
            )
            expect(pair.moved > 0, "nothing has gone from GPU to GPU")
    await ground.check_quiet()


async def _receive(
    ground: Ground, sweeper: Sweeper, nbytes: int, open_pair: _Open
) -> None:
    with faultless_gpus(2, max_delay=2) as gpus:
        async with open_pair(gpus) as pair:
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
                f"a receive of {nbytes} bytes by {pair.near.transport}",
                receive,
                check,
                lambda: pair.near.send_tensor(source),
            )
            expect(pair.moved > 0, "nothing has gone from GPU to GPU")
    await ground.check_quiet()


async def _flush(
    ground: Ground, sweeper: Sweeper, nbytes: int, open_pair: _Open
) -> None:
    with faultless_gpus(2, max_delay=2) as gpus:
        async with open_pair(gpus) as pair:
            source = pair.ours.tensor(noise(nbytes, 1))

            async def check(outcome: Outcome[None]) -> None:
                await pair.near.flush()
                expect_same(await pair.far.recv_tensor(), noise(nbytes, 1))
                await _is_empty(pair)

            await sweeper.sweep(
                f"a flush of {nbytes} bytes by {pair.near.transport}",
                pair.near.flush,
                check,
                lambda: pair.near.send_tensor(source),
            )
    await ground.check_quiet()


async def _is_empty(pair: _Pipes) -> None:
    """Nothing is held by either side, nor by its GPU."""
    expect(not pair.far.statistics().held_tensors, "it was received twice")
    await until(lambda: not pair.near.statistics().in_flight_bytes)
    await until(lambda: not pair.used_bytes)
    expect(pair.near.transport in ("nccl", "cuda_ipc"), "the way was lost")


_OPEN: Final = ("open_pipe", "PipeListener.__aenter__", "Pipe.gpus_settled")
_RECEIVE: Final = ("KVPipe.recv_tensor",)
_SEND: Final = ("KVPipe.send_tensor",)
_FLUSH: Final = ("KVPipe.flush",)

PIPING_ON_GPUS: Final = (
    *(
        Scenario(run, _OPEN, ("local",), sizes=(0,), is_costly=True)
        for run in (a_pipe_between_gpus, a_pipe_within_a_gpu)
    ),
    *(
        Scenario(run, covers, ("local",), (LARGE,), is_costly=True)
        for run, covers in (
            (a_send_between_gpus, _SEND),
            (a_send_within_a_gpu, _SEND),
            (a_receive_between_gpus, _RECEIVE),
            (a_receive_within_a_gpu, _RECEIVE),
            (a_flush_between_gpus, _FLUSH),
            (a_flush_within_a_gpu, _FLUSH),
        )
    ),
)
