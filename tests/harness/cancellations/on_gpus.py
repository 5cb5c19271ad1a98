"""Buffers and pipes on a GPU: opened and used, or as if that had never begun."""

from __future__ import annotations

from typing import Final

import torch

from asynckv.abc import KVEntry
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.peer import connect
from asynckv.buffers.serve import serve
from asynckv.testing.blocked import until
from asynckv.testing.cancellation import Outcome
from asynckv.testing.expectations import expect, expect_same, noise
from asynckv.testing.pairs import open_pipe_pair
from harness.cancellations.entries import (
    LARGE,
    OVERWRITE,
    TOKENS,
    expect_overwritten,
)
from harness.cancellations.grounds import Ground
from harness.cancellations.scenario import Scenario
from harness.cancellations.sweeper import Sweeper, ticks
from harness.fake_devices import (
    calls_of_cuda,
    fake_device,
    fake_device_of,
    faultless_gpus,
)
from harness.nccl_buffer_pairs import NcclBuffers, open_nccl_buffers

__all__ = (
    "ON_GPUS",
    "a_borrow_between_gpus",
    "a_lookup_on_a_gpu",
    "a_pipe_on_a_gpu",
    "a_receive_on_a_gpu",
    "a_select_between_gpus",
    "a_way_between_gpus",
)


async def a_lookup_on_a_gpu(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Has its memory when it is entered, and none when it is closed."""
    own: LookupBuffer
    with fake_device() as gpu:

        async def before() -> None:
            nonlocal own
            own = LookupBuffer("1MiB", device=gpu.device, drain_s=0)

        async def use() -> None:
            async with own:
                expect(bool(gpu.process.owned), "it was entered without memory")

        async def check(outcome: Outcome[None]) -> None:
            await own.aclose()
            await until(lambda: not gpu.process.owned)
            await ground.check_quiet()

        await sweeper.sweep("a lookup on a GPU", use, check, before)


async def a_pipe_on_a_gpu(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Opens its GPU first, on both sides."""
    with fake_device() as gpu:

        async def use() -> None:
            async with open_pipe_pair("mem", device=gpu.device) as (near, far):
                await near.send_tensor(None)
                expect(await far.recv_tensor() is None, "None is a value")

        async def check(outcome: Outcome[None]) -> None:
            await until(lambda: not calls_of_cuda())
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


async def a_way_between_gpus(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Is opened with its link, and leaves nothing on either GPU when that is over."""
    with faultless_gpus(2) as gpus:
        ours, theirs = fake_device_of(gpus.process()), fake_device_of(gpus.process(), 1)
        async with (
            LookupBuffer("1MiB", device=ours.device, drain_s=0) as buffer,
            serve("tcp://127.0.0.1:0", lookup=buffer) as server,
        ):
            before = len(ours.process.owned)

            async def use() -> None:
                where = theirs.device
                async with connect(server.url, device=where, max_bytes="1MiB") as peer:
                    expect(peer.transport == "nccl", "no way was opened")

            def is_quiet() -> bool:
                left = len(ours.process.owned) - before
                return not (left or theirs.process.owned or server._services)

            async def check(outcome: Outcome[None]) -> None:
                await until(is_quiet)

            await sweeper.sweep("a way between GPUs", use, check)
    await ground.check_quiet()


async def a_select_between_gpus(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Into memory of the caller's: quiet when the call has ended."""
    with faultless_gpus(2, max_delay=2) as gpus:
        async with open_nccl_buffers(gpus) as pair:
            key = pair.theirs.tensor(torch.zeros(nbytes, dtype=torch.uint8))

            async def check(outcome: Outcome[KVEntry]) -> None:
                moving = [x for x in pair.theirs.process.space.allocations() if x.users]
                expect(not moving, f"{len(moving)} pieces of memory are written to")
                key.fill_(OVERWRITE)
                await _is_given_back(pair, outcome.cancelled, nbytes)
                expect_overwritten(key)

            await sweeper.sweep(
                f"a select of {nbytes} bytes between GPUs",
                lambda: pair.peer.lookup.drop_select(TOKENS, into={"key": key}),
                check,
                lambda: pair.buffer.insert(TOKENS, None, noise(nbytes, 1), None, None),
            )
    await ground.check_quiet()


async def a_borrow_between_gpus(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Is given back as any other one is."""
    with faultless_gpus(2, max_delay=2) as gpus:
        async with open_nccl_buffers(gpus) as pair:

            async def use() -> None:
                async with pair.peer.lookup.drop_select(TOKENS) as entry:
                    _expect_key(entry, nbytes)
                    del entry
                    await ticks(1)

            async def check(outcome: Outcome[None]) -> None:
                await _is_given_back(pair, outcome.cancelled, nbytes)

            await sweeper.sweep(
                f"a borrow of {nbytes} bytes between GPUs",
                use,
                check,
                lambda: pair.buffer.insert(TOKENS, None, noise(nbytes, 1), None, None),
            )
    await ground.check_quiet()


async def _is_given_back(pair: NcclBuffers, was_cancelled: bool, nbytes: int) -> None:
    """What a cancelled call had is there, once; nothing is kept of any."""
    await until(lambda: not pair.buffer.statistics().leased)
    left = pair.buffer.statistics().entries
    expect(left <= was_cancelled, f"{left} entries are left")
    if left:
        _expect_key(await pair.peer.lookup.drop_select(TOKENS), nbytes)
    await until(lambda: not pair.buffer.statistics().used_bytes)
    await until(lambda: not pair.peer.budget.used_bytes)
    expect(pair.peer.transport == "nccl", "the way was lost")


def _expect_key(entry: KVEntry, nbytes: int) -> None:
    key = entry.key
    expect(isinstance(key, torch.Tensor) and key.is_cuda, "it is on no GPU")
    expect_same(key if isinstance(key, torch.Tensor) else None, noise(nbytes, 1))


_LOOKUP: Final = ("InMemoryBuffer.__aenter__", "InMemoryBuffer.open")
_PIPE: Final = ("open_pipe", "PipeListener.__aenter__")
_RECEIVE: Final = ("KVPipe.recv_tensor",)
_WAY: Final = ("connect",)
_SELECT: Final = ("RemoteLookupBuffer.drop_select",)

ON_GPUS: Final = (
    Scenario(a_lookup_on_a_gpu, _LOOKUP, ("local",), sizes=(0,), is_costly=True),
    Scenario(a_pipe_on_a_gpu, _PIPE, ("local",), sizes=(0,), is_costly=True),
    Scenario(a_receive_on_a_gpu, _RECEIVE, ("local",), is_costly=True),
    Scenario(a_way_between_gpus, _WAY, ("local",), sizes=(0,), is_costly=True),
    Scenario(a_select_between_gpus, _SELECT, ("local",), (LARGE,), is_costly=True),
    Scenario(a_borrow_between_gpus, _SELECT, ("local",), (LARGE,), is_costly=True),
)
