"""Layers made in memory of the GPU that they leave: cancelled anywhere."""

from __future__ import annotations

from typing import Final

import torch

from asynckv.testing.blocked import until
from asynckv.testing.cancellation import Outcome
from asynckv.testing.expectations import expect, expect_same, noise
from asynckv.transfers.routes import GpuRoom, StagingWriter
from asynckv.transfers.source import StagedTensor, release_staged
from asynckv.types import TensorSpec
from harness.cancellations.entries import LARGE, TOKENS
from harness.cancellations.grounds import Ground
from harness.cancellations.partners import Partner
from harness.cancellations.scenario import Scenario
from harness.cancellations.sweeper import Sweeper
from harness.fake_devices import faultless_gpus
from harness.gpu_pairs import GpuPair, open_gpu_pair

__all__ = (
    "STAGING_ON_GPUS",
    "layers_that_wait_for_room",
)

_ROOM_BYTES: Final = 2 * 2**20
_LAYERS: Final = ("key", "value")


async def layers_that_wait_for_room(
    ground: Ground, sweeper: Sweeper, nbytes: int
) -> None:
    """Until somebody releases some: then they are there, or nothing of them is."""
    with faultless_gpus(max_delay=2) as gpus:
        async with open_gpu_pair(gpus, max_bytes=_ROOM_BYTES) as pair:
            await _put(pair, sweeper, nbytes)
            expect(pair.puts.has_shown, "they went by another way")
    await ground.check_quiet()


async def _put(pair: GpuPair, sweeper: Sweeper, nbytes: int) -> None:
    source = pair.theirs.tensor(noise(nbytes, 1))
    room = pair.peer.routes.room or GpuRoom(pair.peer.memory)
    spec = TensorSpec((nbytes,), "uint8")
    filler: list[StagedTensor] = []
    partner: Partner

    async def make_room() -> None:
        release_staged(filler)

    async def before() -> None:
        nonlocal partner
        most = TensorSpec((_ROOM_BYTES - nbytes,), "uint8")
        filler[:] = await room.take([most], set()) or ()
        partner = Partner(sweeper, lambda: bool(room._line), make_room)

    async def put() -> None:
        specs = dict.fromkeys(_LAYERS, spec)
        async with pair.peer.lookup.open_insert(TOKENS, None, specs) as writer:
            if not isinstance(writer, StagingWriter):
                raise AssertionError("it stages nothing")
            staged = await writer.room([spec, spec]) or []
            try:
                for name, one in zip(_LAYERS, staged, strict=True):
                    await pair.peer.pool.copy([source], [one.place()], digest=False)
                    await writer.put_staged(name, one)
            finally:
                release_staged(staged)

    async def check(outcome: Outcome[None]) -> None:
        await partner.ended()
        expect(not room._line, "somebody still waits for room")
        await until(lambda: not pair.puts.staged_bytes)
        await pair.peer.lookup.peek(TOKENS)  # all that was said before is heard
        await until(lambda: not _coming(pair))
        left = bool(pair.buffer.statistics().entries)
        expect(left or outcome.cancelled, "it was put, and is not there")
        if left:
            entry = await pair.buffer.drop_select(TOKENS)
            key = entry.key if isinstance(entry.key, torch.Tensor) else None
            expect_same(key, noise(nbytes, 1))
            del entry, key
        await pair.emptied()

    what = f"two layers of {nbytes} bytes that wait for room"
    await sweeper.sweep(what, put, check, before)


def _coming(pair: GpuPair) -> int:
    every = [services.lookup for services in pair.server._services]
    return sum(len(lookup.tasks) for lookup in every if lookup is not None)


_STAGING: Final = ("StagingWriter.room", "StagingWriter.put_staged")

STAGING_ON_GPUS: Final = (
    Scenario(layers_that_wait_for_room, _STAGING, ("local",), (LARGE,), is_costly=True),
)
