"""Layers streamed from one process to another on one GPU: cancelled anywhere."""

from __future__ import annotations

from typing import Final

import torch

from asynckv.testing.blocked import until
from asynckv.testing.cancellation import Outcome
from asynckv.testing.expectations import expect, expect_same, noise
from asynckv.types import TensorSpec
from harness.cancellations.entries import (
    LARGE,
    OVERWRITE,
    TOKENS,
    expect_overwritten,
)
from harness.cancellations.grounds import Ground
from harness.cancellations.partners import Partner
from harness.cancellations.scenario import Scenario
from harness.cancellations.sweeper import Sweeper
from harness.fake_devices import faultless_gpus
from harness.gpu_pairs import GpuPair, open_gpu_pair

__all__ = ("STREAMING_ON_GPUS", "a_reader_on_one_gpu")

_LAYERS: Final = ("key", "value")


async def a_reader_on_one_gpu(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Beside its writer, into memory of the caller's: quiet when it has ended."""
    with faultless_gpus(max_delay=2) as gpus:
        async with open_gpu_pair(gpus) as pair:
            await _read_beside_a_writer(pair, sweeper, nbytes)
            expect(pair.peer.transport == "cuda_ipc", "it came by another way")
    await ground.check_quiet()


async def _read_beside_a_writer(pair: GpuPair, sweeper: Sweeper, nbytes: int) -> None:
    into = pair.theirs.tensor(torch.zeros(nbytes, dtype=torch.uint8))
    place = pair.theirs.tensors.memory_of(into)
    partner: Partner

    async def write() -> None:
        spec = TensorSpec((nbytes,), "uint8")
        specs = dict.fromkeys(_LAYERS, spec)
        async with pair.buffer.open_insert(TOKENS, None, specs) as writer:
            for salt, name in enumerate(_LAYERS, 1):
                await writer.put(name, noise(nbytes, salt))

    async def before() -> None:
        nonlocal partner
        partner = Partner(
            sweeper, lambda: pair.buffer.statistics().waiting_selects > 0, write
        )

    async def read() -> None:
        opened = pair.peer.lookup.open_drop_select(TOKENS, into={"key": into})
        async with opened as stream:
            for salt, name in enumerate(_LAYERS, 1):
                expect_same(await stream.wait_for(name), noise(nbytes, salt))

    async def check(outcome: Outcome[None]) -> None:
        there, _ = pair.theirs.process.space.find(place.address, place.nbytes)
        expect(not there.users, "memory of the caller's is written to")
        into.fill_(OVERWRITE)
        await partner.ended()
        await until(lambda: not pair.buffer.statistics().leased)
        left = pair.buffer.statistics().entries
        expect(left <= outcome.cancelled, f"{left} entries are left")
        if left:
            entry = await pair.peer.lookup.drop_select(TOKENS)
            key = entry.key if isinstance(entry.key, torch.Tensor) else None
            expect_same(key, noise(nbytes, 1))
            del entry, key
        await until(lambda: not pair.buffer.statistics().mapped_by)
        await until(lambda: not pair.buffer.statistics().used_bytes)
        expect(not pair.peer.budget.used_bytes, "its bound is still charged")
        expect(not pair.pinned_bytes, "the peer keeps memory of the buffer")
        expect_overwritten(into)

    await sweeper.sweep(f"a reader of {nbytes} bytes on one GPU", read, check, before)


_OPEN_SELECT: Final = (
    "RemoteLookupBuffer.open_drop_select",
    "SelectStream.wait_for",
)

STREAMING_ON_GPUS: Final = (
    Scenario(a_reader_on_one_gpu, _OPEN_SELECT, ("local",), (LARGE,), is_costly=True),
)
