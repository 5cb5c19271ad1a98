from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import asynckv
from asynckv.errors import ConfigError, EndOfStream, PeerLost
from asynckv.pipes.group import Group, join_group
from asynckv.testing import (
    CancelMode,
    Outcome,
    sweep_cancellation,
    until_blocked,
    use_across_tasks,
)
from asynckv.testing.pairs import free_port, open_group
from asynckv.testing.pipe_checks import PIPE_CHECKS, PipeCheck

pytestmark = pytest.mark.both_loops

CHECKS_OF_ONE_SIDE = [
    check
    for check in PIPE_CHECKS
    if check.__name__
    not in (
        "a_lost_peer_is_an_error",
        "both_sides_may_send_before_either_receives",
        "the_goodbye_comes_after_everything",
    )
]


async def go_round(group: Group) -> None:
    """Send to the next rank, receive from the one before, pass the barrier."""
    await group.next_pipe.send_tensor(torch.tensor(group.rank))
    found = await group.prev_pipe.recv_tensor()
    assert found == torch.tensor((group.rank - 1) % group.size)
    await group.barrier()


@pytest.mark.parametrize("size", [1, 2, 3, 8])
async def test_the_ring_goes_round(size: int) -> None:
    async with open_group(size) as groups:
        assert [group.rank for group in groups] == list(range(size))
        for _ in range(3):
            await asyncio.gather(*map(go_round, groups))


async def test_there_is_a_pipe_between_any_two_ranks() -> None:
    async with open_group(4) as groups:
        for near in groups:
            for far in groups:
                if near is not far:
                    sent = torch.tensor([near.rank, far.rank])
                    await near.pipe_to(far.rank).send_tensor(sent)
        for far in groups:
            for rank in range(4):
                if rank != far.rank:
                    found = await far.pipe_to(rank).recv_tensor()
                    assert found is not None
                    assert found.tolist() == [rank, far.rank]


@pytest.mark.parametrize("check", CHECKS_OF_ONE_SIDE, ids=lambda check: check.__name__)
async def test_the_pipe_of_a_group_of_one_keeps(check: PipeCheck) -> None:
    async with open_group(1) as (group,):
        await check(group.pipe_to(0), group.prev_pipe)


async def test_a_group_has_pipes_to_the_other_ranks_only() -> None:
    async with open_group(2) as (group, _):
        with pytest.raises(ValueError, match="0 is this very rank"):
            group.pipe_to(0)
        with pytest.raises(ValueError, match="2 is no rank of a group of 2"):
            group.pipe_to(2)
        assert group.next_pipe is group.prev_pipe is group.pipe_to(1)
        assert repr(group) == "<Group, rank 0 of 2>"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"rank": 2}, ValueError),
        ({"rank": -1}, ValueError),
        ({"size": 0}, ValueError),
        ({"port": 0}, ValueError),
        ({"port": 65535, "port_offset": 1}, ValueError),
        ({"device": "cuda:x"}, ConfigError),
        ({"max_bytes": "much"}, ValueError),
    ],
)
def test_what_cannot_be_a_group_is_refused(
    options: dict[str, Any], error: type[Exception]
) -> None:
    valid: dict[str, Any] = {"rank": 0, "size": 2, "host": "127.0.0.1", "port": 7000}
    with pytest.raises(error):
        join_group(**{**valid, **options})


async def test_the_port_offset_is_added_to_the_port() -> None:
    port = free_port()
    for offset in (0, 1):
        managers = [
            asynckv.join_group(
                rank=rank,
                size=2,
                host="localhost",
                port=port - offset,
                port_offset=offset,
            )
            for rank in range(2)
        ]
        groups = await asyncio.gather(*(m.__aenter__() for m in managers))
        await asyncio.gather(*map(go_round, groups))
        for manager in managers:
            await manager.__aexit__(None, None, None)


async def test_a_rank_that_leaves_ends_its_pipes_and_is_named_at_the_barrier() -> None:
    async with open_group(3) as (zero, one, two):
        waiting = [asyncio.create_task(group.barrier()) for group in (zero, one)]
        await until_blocked(*waiting)
        await two.aclose()
        for task in waiting:
            with pytest.raises(PeerLost, match="rank 2 has left the group"):
                await task
        with pytest.raises(EndOfStream):
            await one.pipe_to(2).recv_tensor()
        await one.pipe_to(0).send_tensor(None)
        assert await zero.pipe_to(1).recv_tensor() is None


async def test_a_rank_that_is_left_by_an_error_is_lost_to_the_others() -> None:
    async with open_group(2) as (zero, one):
        with pytest.raises(ZeroDivisionError):
            async with one:
                raise ZeroDivisionError
        with pytest.raises(PeerLost):
            await zero.pipe_to(1).recv_tensor()
        with pytest.raises(PeerLost, match="rank 1 is lost"):
            await zero.barrier()


async def test_a_group_is_left_in_another_task_than_it_was_entered() -> None:
    await use_across_tasks(open_group(2), lambda groups: groups[0].next_pipe.flush())


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_cancelled_barrier_is_waited_at_again(rank: int) -> None:
    others: list[asyncio.Task[None]] = []

    async with open_group(2) as groups:

        async def before() -> None:
            others.append(asyncio.create_task(groups[1 - rank].barrier()))

        async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
            if outcome.cancelled:
                await groups[rank].barrier()
            await others.pop()

        modes: tuple[CancelMode, ...] = ("task", "scope", "completion")
        await sweep_cancellation(
            groups[rank].barrier, check, before=before, modes=modes
        )


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_cancelled_joining_leaves_nothing_behind(rank: int) -> None:
    port = free_port()
    others: list[asyncio.Task[None]] = []

    async def join(rank: int) -> None:
        async with join_group(
            rank=rank, size=2, host="127.0.0.1", port=port, timeout_s=5
        ) as group:
            await group.barrier()

    async def before() -> None:
        others.append(asyncio.create_task(join(1 - rank)))

    async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
        other = others.pop()
        if outcome.cancelled:
            # Lost in the middle, or waiting for somebody to come (again).
            await asyncio.wait({other}, timeout=0.01)
            other.cancel()
        (error,) = await asyncio.gather(other, return_exceptions=True)
        assert error is None or isinstance(error, PeerLost | asyncio.CancelledError)

    await sweep_cancellation(lambda: join(rank), check, before=before)


SENDING_RANK = """
import asyncio, sys, torch
import asynckv

async def main(port: int) -> None:
    async with asynckv.join_group(rank=1, size=2, host="127.0.0.1", port=port) as group:
        while True:
            await group.next_pipe.send_tensor(torch.ones(2**20))

asyncio.run(main(int(sys.argv[1])))
"""


@pytest.fixture
def sending_rank() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Another process that is rank 1 of 2, and the port of rank 0."""
    port = free_port()
    command = [sys.executable, "-c", SENDING_RANK, str(port)]
    with subprocess.Popen(command) as process:
        yield process, port
        process.kill()


@pytest.mark.multiprocess
async def test_a_rank_that_is_killed_in_the_middle_is_lost_and_named(
    sending_rank: tuple[subprocess.Popen[bytes], int],
) -> None:
    process, port = sending_rank
    async with join_group(rank=0, size=2, host="127.0.0.1", port=port) as group:
        for _ in range(3):
            assert await group.prev_pipe.recv_tensor() is not None
        process.kill()
        with pytest.raises(PeerLost, match="rank 1 is lost"):
            await group.barrier()
        with pytest.raises(PeerLost):
            while True:
                await group.prev_pipe.recv_tensor()
