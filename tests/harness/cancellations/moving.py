"""Payload transports: their waits, which a cancellation does not cut short."""

from __future__ import annotations

import contextlib
import threading
from typing import Final

import torch

from asynckv.abc import PayloadTransport
from asynckv.tensors.views import bytes_of
from asynckv.testing.blocked import until
from asynckv.testing.cancellation import Outcome
from asynckv.testing.expectations import expect
from asynckv.testing.pairs import TransportKind, open_transport_pair
from harness.cancellations.entries import OVERWRITE
from harness.cancellations.grounds import Ground, Kind
from harness.cancellations.scenario import Scenario
from harness.cancellations.sweeper import Sweeper
from harness.nccl_pairs import open_nccl_pair

__all__ = ("MOVING", "a_quiesce", "a_transports_end")

_CHUNKS: Final = 14 * 2**20
_KINDS: Final[tuple[Kind, ...]] = ("local", "mem", "tcp", "unix")


def _memory(value: int, nbytes: int) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def _open_pair(
    ground: Ground,
) -> contextlib.AbstractAsyncContextManager[tuple[PayloadTransport, PayloadTransport]]:
    """Open what moves payload on that ground; where no link is, that between GPUs."""
    if ground.is_local:
        return open_nccl_pair(_no_loss, _no_loss)
    kinds: dict[str, TransportKind] = {"tcp": "tcp", "unix": "unix", "mem": "mem"}
    return open_transport_pair(kinds[ground.kind], _no_loss, _no_loss)


def _workers_left() -> list[str]:
    threads = [thread.name for thread in threading.enumerate()]
    return [name for name in threads if name.startswith("asynckv-gpu")]


def _ignore(digest: bytes, error: BaseException | None) -> None:
    """Whoever is told does not care."""


def _no_loss(error: Exception) -> None:
    """A peer that hangs up in the middle is no surprise here."""


async def a_quiesce(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """On its end, cancelled or not, nothing touches the memory any more."""
    source, target = _memory(1, nbytes), _memory(0, nbytes)
    number, has_begun = 1, False

    async with _open_pair(ground) as (near, far):

        async def before() -> None:
            nonlocal number, has_begun
            number, has_begun = number + 2, False
            source.fill_(1)
            target.zero_()
            far.announce(number)
            far.receive(number, 0, bytes_of(target), _ignore)
            near.send(number, 0, bytes_of(source), _ignore)
            await until(lambda: bool(target[0]))  # the first of them have landed
            await sweeper.pause()
            far.stop(number)

        async def wait() -> None:
            nonlocal has_begun
            has_begun = True
            try:
                await far.quiesce(number)
            finally:
                target.fill_(OVERWRITE)

        async def check(outcome: Outcome[None]) -> None:
            if not has_begun:
                await far.quiesce(number)
            target.fill_(OVERWRITE)
            near.stop(number)
            await near.quiesce(number)
            source.fill_(2)
            await far.quiesce(number)
            expect(bool((target == OVERWRITE).all()), "written to afterwards")

        await sweeper.sweep("a quiesce", wait, check, before)
    await ground.check_quiet()


async def a_transports_end(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Opened, used and closed: everybody is told, and soon."""
    told: list[BaseException | None] = []
    expected = 0

    def note(digest: bytes, error: BaseException | None) -> None:
        told.append(error)

    async def before() -> None:
        nonlocal expected
        expected = 0
        told.clear()

    async def use() -> None:
        nonlocal expected
        async with _open_pair(ground) as (near, far):
            far.announce(1)
            far.receive(1, 0, bytes_of(_memory(0, nbytes)), note)
            near.send(1, 0, bytes_of(_memory(1, nbytes)), note)
            near.receive(2, 0, bytes_of(_memory(0, nbytes)), note)  # never comes
            expected = 3
            await sweeper.pause()
            await near.aclose()

    async def check(outcome: Outcome[None]) -> None:
        await until(lambda: len(told) == expected)
        expect(not _workers_left(), f"left behind: {_workers_left()}")
        await ground.check_quiet()

    await sweeper.sweep("a transport's end", use, check, before)


MOVING: Final = tuple(
    Scenario(run, covers, _KINDS, sizes=(_CHUNKS,), is_costly=True)
    for run, covers in (
        (a_quiesce, ("PayloadTransport.quiesce",)),
        (a_transports_end, ("PayloadTransport.open", "PayloadTransport.aclose")),
    )
)
