"""Pipes on a GPU, between two of them, and within one of two processes: cancelled."""

from __future__ import annotations

import gc
from typing import Any, Final

import torch

from asynckv.pipes.endpoints import listen_pipe, open_pipe
from asynckv.testing.blocked import until
from asynckv.testing.expectations import expect, expect_same, noise
from asynckv.testing.pairs import open_pipe_pair
from harness.cancellations.entries import OVERWRITE, expect_overwritten, zeros
from harness.cancellations.grounds import Ground
from harness.cancellations.sweeper import LARGE, SMALL, Sweeper, scenario, ticks
from harness.fake_devices import (
    calls_of_cuda,
    fake_device,
    fake_device_of,
    faultless_gpus,
)
from harness.gpu_pipe_pairs import GpuPipes, open_ipc_pipes, open_nccl_pipes

__all__: tuple[str, ...] = ()

_ONCE: Final[dict[str, Any]] = {"kinds": ("local",), "sizes": (0,), "is_costly": True}
_LARGE: Final = _ONCE | {"sizes": (LARGE,)}
_OPENED: Final = ("open_pipe", "PipeListener.__aenter__")
_PAIRS: Final[dict[str, Any]] = {"nccl": open_nccl_pipes, "cuda_ipc": open_ipc_pipes}
"""What opens pipes, by how their tensors go."""


@scenario(*_OPENED, **_ONCE)
async def a_pipe_on_a_gpu(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Opens its GPU first, on both sides."""
    with fake_device() as gpu:

        async def use() -> None:
            async with open_pipe_pair("mem", device=gpu.device) as (near, far):
                await near.send_tensor(None)
                expect(await far.recv_tensor() is None, "None is a value")

        async for cancel in sweeper.sweep():
            await cancel(use)
            await until(lambda: not calls_of_cuda())


@scenario("KVPipe.recv_tensor", **_ONCE | {"sizes": (SMALL, LARGE)})
async def a_receive_on_a_gpu(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Has taken nothing, and no copy is under way."""
    contents = noise(nbytes, 1)
    with fake_device(max_delay=2) as gpu:
        async with open_pipe_pair("mem", device=gpu.device) as (near, far):
            async for cancel in sweeper.sweep(is_open=True):
                await near.send_tensor(contents)
                outcome = await cancel(far.recv_tensor)
                moving = [x for x in gpu.process.space.allocations() if x.users]
                expect(not moving, f"{len(moving)} copies are under way")
                if outcome.cancelled:
                    expect_same(await far.recv_tensor(), contents)
                await near.flush()
                expect(not far.statistics().held_tensors, "it was received twice")


@scenario(*_OPENED, "Pipe.gpus_settled", **_ONCE)
async def a_pipe_of_gpus(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Goes on alone wherever its opening ends, and leaves nothing on either GPU.

    No memory of the peer's stays open.
    """
    for transport in _PAIRS:
        with faultless_gpus(2) as gpus:
            listens_on = int(transport == "nccl")
            sides = [fake_device_of(gpus.process(), n) for n in (0, listens_on)]
            ours, theirs = (side.device for side in sides)

            async def use(ours: Any, theirs: Any, transport: str) -> None:
                async with (
                    listen_pipe(
                        "tcp://127.0.0.1:0", device=theirs, max_bytes="1MiB"
                    ) as listener,
                    open_pipe(listener.url, device=ours, max_bytes="1MiB") as near,
                    await listener.accept() as far,
                ):
                    await ticks(8)
                    await near.gpus_settled()
                    await far.gpus_settled()
                    expect(near.transport == transport, "no way was opened")

            def is_quiet(sides: Any) -> bool:
                left = [one for side in sides for one in side.process.owned]
                opened = sum(len(side.process.cuda._opened) for side in sides)
                return not opened and not any(one.array.nbytes > 1 for one in left)

            async for cancel in sweeper.sweep(transport, is_open=True):
                await cancel(use, ours, theirs, transport)
                await until(lambda: not calls_of_cuda())
                gc.collect()
                await until(lambda: is_quiet(sides))


@scenario("KVPipe.send_tensor", "KVPipe.recv_tensor", "KVPipe.flush", **_LARGE)
async def a_tensor_between_gpus(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """A cancelled send has sent nothing, or all, and does not read any more.

    A cancelled receive has taken nothing, and does not write any more. A cancelled
    flush leaves no trace, and what was sent arrives.
    """
    sent = noise(nbytes, 1)
    for transport, open_pair in _PAIRS.items():
        with faultless_gpus(2, max_delay=2) as gpus:
            async with open_pair(gpus) as pair:
                source = pair.ours.tensor(sent)
                into = pair.theirs.tensor(zeros(nbytes))
                async for cancel in sweeper.sweep(f"sent {transport}", is_open=True):
                    source.as_subclass(torch.Tensor).copy_(sent)
                    outcome = await cancel(pair.near.send_tensor, source)
                    source.fill_(OVERWRITE)
                    await pair.near.send_tensor(None)
                    if not outcome.cancelled:
                        expect_same(await pair.far.recv_tensor(), sent)
                    found = await pair.far.recv_tensor()
                    expect(found is None, "a cancelled send has sent")
                    await _is_empty(pair)
                source.as_subclass(torch.Tensor).copy_(sent)
                async for cancel in sweeper.sweep(f"taken {transport}", is_open=True):
                    await pair.near.send_tensor(source)
                    outcome = await cancel(pair.far.recv_tensor, into)
                    if outcome.value is not None:
                        expect_same(outcome.value, sent)
                    into.fill_(OVERWRITE)
                    if outcome.cancelled:
                        expect_same(await pair.far.recv_tensor(), sent)
                    await _is_empty(pair)
                    expect_overwritten(into)
                async for cancel in sweeper.sweep(f"flushed {transport}", is_open=True):
                    await pair.near.send_tensor(source)
                    await cancel(pair.near.flush)
                    await pair.near.flush()
                    expect_same(await pair.far.recv_tensor(), sent)
                    await _is_empty(pair)
                expect(pair.moved > 0, "nothing has gone from GPU to GPU")


async def _is_empty(pair: GpuPipes) -> None:
    """Nothing is held by either side, nor by its GPU."""
    await pair.near.flush()
    expect(not pair.far.statistics().held_tensors, "it was received twice")
    await until(lambda: not pair.near.statistics().in_flight_bytes)
    await until(lambda: not pair.used_bytes)
    expect(pair.near.transport in ("nccl", "cuda_ipc"), "the way was lost")
