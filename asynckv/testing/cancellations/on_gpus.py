"""Buffers and pipes on a GPU: opened and used, or as if that had never begun."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import torch

from asynckv.abc import KVCacheBuffer
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.store import StoreBuffer
from asynckv.testing.blocked import until
from asynckv.testing.cancellation import Outcome
from asynckv.testing.cancellations.grounds import Ground
from asynckv.testing.cancellations.scenario import Scenario
from asynckv.testing.cancellations.sweeper import Sweeper
from asynckv.testing.expectations import expect, expect_same, noise
from asynckv.testing.fake_devices import FakeDevice, fake_device
from asynckv.testing.pipe_pairs import open_pipe_pair

__all__ = (
    "ON_GPUS",
    "a_lookup_on_a_gpu",
    "a_pipe_on_a_gpu",
    "a_receive_on_a_gpu",
    "a_store_on_a_gpu",
)


async def a_lookup_on_a_gpu(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Has its memory when it is entered, and none when it is closed."""
    with fake_device() as gpu:
        await _enter(
            *("a lookup on a GPU", ground, sweeper, gpu),
            lambda: LookupBuffer("1MiB", device=gpu.device, drain_s=0),
        )


async def a_store_on_a_gpu(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """As a lookup buffer."""
    with fake_device() as gpu:
        await _enter(
            *("a store on a GPU", ground, sweeper, gpu),
            lambda: StoreBuffer("1MiB", device=gpu.device),
        )


async def _enter(
    name: str,
    ground: Ground,
    sweeper: Sweeper,
    gpu: FakeDevice,
    make: Callable[[], KVCacheBuffer],
) -> None:
    own: KVCacheBuffer

    async def before() -> None:
        nonlocal own
        own = make()

    async def use() -> None:
        async with own:
            expect(bool(gpu.process.owned), "it was entered without memory")

    async def check(outcome: Outcome[None]) -> None:
        await own.aclose()
        await until(lambda: not gpu.process.owned)
        await ground.check_quiet()

    await sweeper.sweep(name, use, check, before)


async def a_pipe_on_a_gpu(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Opens its GPU first, on both sides."""
    with fake_device() as gpu:

        async def use() -> None:
            async with open_pipe_pair("mem", device=gpu.device) as (near, far):
                await near.send_tensor(None)
                expect(await far.recv_tensor() is None, "None is a value")

        async def check(outcome: Outcome[None]) -> None:
            await until(lambda: not _calls_of_cuda())
            await ground.check_quiet()

        await sweeper.sweep("a pipe on a GPU", use, check)


async def a_receive_on_a_gpu(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Has taken nothing, and no copy is under way."""
    contents = noise(nbytes, 1)
    with fake_device(max_delay=2) as gpu:
        async with open_pipe_pair("mem", device=gpu.device) as (near, far):

            async def before() -> None:
                await near.send_tensor(contents)

            async def check(outcome: Outcome[torch.Tensor | None]) -> None:
                moving = [x for x in gpu.process.space.allocations() if x.users]
                expect(not moving, f"{len(moving)} copies are under way")
                if outcome.cancelled:
                    expect_same(await far.recv_tensor(), contents)
                await near.flush()
                expect(not far.statistics().held_tensors, "it was received twice")

            name = f"a receive of {nbytes} bytes on a GPU"
            await sweeper.sweep(name, far.recv_tensor, check, before)
    await ground.check_quiet()


def _calls_of_cuda() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("asynckv-gpu-call")]


_LOOKUP: Final = ("LookupBuffer.__aenter__", "LookupBuffer.open")
_STORE: Final = ("StoreBuffer.__aenter__", "StoreBuffer.open")
_PIPE: Final = ("open_pipe", "PipeListener.__aenter__")
_RECEIVE: Final = ("KVPipe.recv_tensor",)

ON_GPUS: Final = (
    Scenario(a_lookup_on_a_gpu, _LOOKUP, ("local",), sizes=(0,), is_costly=True),
    Scenario(a_store_on_a_gpu, _STORE, ("local",), sizes=(0,), is_costly=True),
    Scenario(a_pipe_on_a_gpu, _PIPE, ("local",), sizes=(0,), is_costly=True),
    Scenario(a_receive_on_a_gpu, _RECEIVE, ("local",), is_costly=True),
)
