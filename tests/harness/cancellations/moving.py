"""Payload transports: their waits, which a cancellation does not cut short."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Final

import torch

from asynckv.abc import PayloadTransport
from asynckv.tensors.views import bytes_of
from asynckv.testing.blocked import until
from asynckv.testing.expectations import expect
from asynckv.testing.pairs import TransportKind, open_transport_pair
from harness.cancellations.entries import OVERWRITE
from harness.cancellations.grounds import Ground
from harness.cancellations.sweeper import Sweeper, scenario
from harness.nccl_pairs import open_nccl_pair

__all__: tuple[str, ...] = ()

_BY_CHUNKS: Final[dict[str, Any]] = {
    "kinds": ("local", "mem", "tcp", "unix"),
    "sizes": (14 * 2**20,),
    "is_costly": True,
}


def _memory(value: int, nbytes: int) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def _open_pair(
    ground: Ground,
) -> contextlib.AbstractAsyncContextManager[tuple[PayloadTransport, PayloadTransport]]:
    """Open what moves payload on that ground; where no link is, that between GPUs."""
    if ground.is_local:
        return open_nccl_pair(_ignore, _ignore)
    kinds: dict[str, TransportKind] = {"tcp": "tcp", "unix": "unix", "mem": "mem"}
    return open_transport_pair(kinds[ground.kind], _ignore, _ignore)


def _ignore(*told: object) -> None:
    """Whoever is told does not care, nor of a peer that hangs up in the middle."""


@scenario("PayloadTransport.quiesce", **_BY_CHUNKS)
async def a_quiesce(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """On its end, cancelled or not, nothing touches the memory any more."""
    source, target = _memory(1, nbytes), _memory(0, nbytes)
    async with _open_pair(ground) as (near, far):

        async def wait(number: int) -> None:
            try:
                await far.quiesce(number)
            finally:
                target.fill_(OVERWRITE)

        async for cancel in sweeper.sweep(is_open=True):
            number = sweeper.rounds + 1
            source.fill_(1)
            target.zero_()
            far.announce(number)
            far.receive(number, 0, bytes_of(target), _ignore)
            near.send(number, 0, bytes_of(source), _ignore)
            await until(lambda: bool(target[0]))  # the first of them have landed
            await sweeper.pause()
            far.stop(number)
            await cancel(wait, number)
            if not cancel.has_begun:
                await far.quiesce(number)
            target.fill_(OVERWRITE)
            near.stop(number)
            await near.quiesce(number)
            source.fill_(2)
            await far.quiesce(number)
            expect(bool((target == OVERWRITE).all()), "written to afterwards")


@scenario("PayloadTransport.open", "PayloadTransport.aclose", **_BY_CHUNKS)
async def a_transports_end(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Opened, used and closed: everybody is told, and soon."""
    told: list[BaseException | None] = []
    is_used = False

    def note(digest: bytes, error: BaseException | None) -> None:
        told.append(error)

    async def use() -> None:
        nonlocal is_used
        async with _open_pair(ground) as (near, far):
            far.announce(1)
            far.receive(1, 0, bytes_of(_memory(0, nbytes)), note)
            near.send(1, 0, bytes_of(_memory(1, nbytes)), note)
            near.receive(2, 0, bytes_of(_memory(0, nbytes)), note)  # never comes
            is_used = True
            await sweeper.pause()
            await near.aclose()

    def workers() -> list[str]:
        names = [thread.name for thread in threading.enumerate()]
        return [name for name in names if name.startswith("asynckv-gpu")]

    async for cancel in sweeper.sweep():
        told.clear()
        is_used = False
        await cancel(use)
        await until(lambda: len(told) == 3 * is_used)
        expect(not workers(), f"left behind: {workers()}")
