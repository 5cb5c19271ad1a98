"""Groups: a rank that gives up is lost to the others, and they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

from asynckv.errors import EndOfStream, PeerLost
from asynckv.pipes.group import Group, join_group
from asynckv.testing.cancellation import Outcome
from asynckv.testing.expectations import expect
from asynckv.testing.pairs import free_port, open_group
from harness.cancellations.grounds import Ground, Kind
from harness.cancellations.partners import Closing
from harness.cancellations.scenario import Scenario
from harness.cancellations.sweeper import Sweeper, ticks

__all__ = ("GROUPING", "a_barrier", "a_groups_end", "a_joining")


async def a_barrier(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """It is waited at again, by either rank."""
    others: list[asyncio.Task[None]] = []

    async def pass_by(group: Group) -> None:
        await sweeper.pause()
        await group.barrier()

    async with open_group(2, **ground.options) as groups:
        for rank in range(2):
            near, far = groups[rank], groups[1 - rank]

            async def before(far: Group = far) -> None:
                others.append(asyncio.create_task(pass_by(far)))

            async def check(outcome: Outcome[None], near: Group = near) -> None:
                if outcome.cancelled:
                    await near.barrier()
                await others.pop()

            await sweeper.sweep(
                f"a barrier of rank {rank}", near.barrier, check, before
            )
    await ground.check_quiet()


async def a_joining(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """Joined, used and left, by either rank."""
    port = free_port()
    for rank in range(2):
        await _cancel_joining(ground, sweeper, rank, port)


async def _cancel_joining(
    ground: Ground, sweeper: Sweeper, rank: int, port: int
) -> None:
    other: asyncio.Task[None]

    async def join(rank: int) -> None:
        opened = join_group(
            rank=rank,
            size=2,
            host="127.0.0.1",
            port=port,
            timeout_s=10,
            max_bytes=2**20,
            **ground.options,
        )
        async with opened as group:
            await group.barrier()

    async def before() -> None:
        nonlocal other
        other = asyncio.create_task(join(1 - rank))
        await sweeper.pause()

    async def check(outcome: Outcome[None]) -> None:
        if outcome.cancelled:
            # Lost in the middle, or waiting for somebody to come (again).
            await ticks(20)
            other.cancel()
        (error,) = await asyncio.gather(other, return_exceptions=True)
        is_told = isinstance(error, PeerLost | asyncio.CancelledError)
        expect(error is None or (outcome.cancelled and is_told), repr(error))
        await ground.check_quiet()

    await sweeper.sweep(f"rank {rank} joins", lambda: join(rank), check, before)


async def a_groups_end(ground: Ground, sweeper: Sweeper, nbytes: int) -> None:
    """The other rank hears of it."""
    groups: tuple[Group, ...]
    opened: Any
    closing: Closing

    async def before() -> None:
        nonlocal groups, opened, closing
        closing = Closing()
        opened = open_group(2, **ground.options)
        groups = await opened.__aenter__()

    async def check(outcome: Outcome[None]) -> None:
        if not closing.has_begun:
            groups[0].abort()
        (error,) = await asyncio.gather(
            groups[1].prev_pipe.recv_tensor(), return_exceptions=True
        )
        is_told = isinstance(error, PeerLost | EndOfStream)
        expect(is_told, f"the other rank received {error!r}")
        groups[1].abort()
        await groups[1].aclose()
        await groups[0].aclose()
        await opened.__aexit__(None, None, None)
        await ground.check_quiet()

    def close() -> Coroutine[Any, Any, None]:
        return closing.run(groups[0].aclose)

    await sweeper.sweep("a group's end", close, check, before)


_BY_TCP: Final[tuple[Kind, ...]] = ("tcp", "tls")

GROUPING: Final = tuple(
    Scenario(run, covers, kinds, sizes=(0,), is_costly=True)
    for run, covers, kinds in (
        (a_barrier, ("Group.barrier",), _BY_TCP),
        (a_joining, ("join_group", "Group.__aenter__", "Group.__aexit__"), _BY_TCP),
        (a_groups_end, ("Group.aclose",), _BY_TCP),
    )
)
