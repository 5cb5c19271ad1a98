from __future__ import annotations

import asyncio

import pytest

from asynckv.errors import ConfigError, PeerLost
from asynckv.links.dial import dial
from asynckv.links.options import new_identity
from asynckv.pipes.end import PipeEnd
from asynckv.pipes.joining import Joining
from asynckv.pipes.pipe import Pipe
from asynckv.protocol.frames import JoinGroup, Peek
from asynckv.testing import until_blocked
from asynckv.testing.link_pairs import Hearer
from asynckv.testing.pipe_pairs import free_port

pytestmark = pytest.mark.both_loops


def joining(rank: int, size: int, port: int, timeout_s: float = 10.0) -> Joining:
    return Joining(
        rank, size, host="127.0.0.1", port=port, timeout_s=timeout_s, max_bytes=2**20
    )


async def close(rank: Joining, pipes: dict[int, Pipe]) -> None:
    for pipe in pipes.values():
        pipe.abort()
        await pipe.aclose()
    await rank.aclose()


async def come_early(port: int) -> tuple[asyncio.Task[dict[int, Pipe]], Joining]:
    """Rank 0 of two waits for rank 1."""
    leader = joining(0, 2, port)
    task = asyncio.create_task(leader.join())
    await until_blocked(task)
    return task, leader


async def test_rank_0_may_come_last() -> None:
    port = free_port()
    follower = joining(1, 2, port)
    early = asyncio.create_task(follower.join())
    await asyncio.wait({early}, timeout=0.1)
    task, leader = await come_early(port)
    await close(leader, await task)
    await close(follower, await early)


async def test_a_group_of_one_is_a_pipe_to_itself() -> None:
    alone = joining(0, 1, 0)
    pipes = await alone.join()
    await pipes[0].send_tensor(None)
    assert await pipes[0].recv_tensor() is None
    await pipes[0].aclose()
    await alone.aclose()


@pytest.mark.parametrize("missing", [0, 1, 2])
async def test_a_rank_that_never_comes_is_named_by_all_others(missing: int) -> None:
    port = free_port()
    ranks = [joining(rank, 3, port, 0.3) for rank in range(3) if rank != missing]
    found = await asyncio.gather(*(r.join() for r in ranks), return_exceptions=True)
    assert all(isinstance(error, PeerLost) for error in found)
    assert all(f"rank {missing} " in str(error) for error in found)
    assert all("within 0.3 s" in str(error) for error in found)


async def test_a_rank_that_gives_up_early_knows_who_is_missing() -> None:
    port = free_port()
    leader = joining(0, 3, port)
    waiting = asyncio.create_task(leader.join())
    await until_blocked(waiting)
    with pytest.raises(PeerLost, match="rank 1: rank 2 of 3 did not come"):
        await joining(1, 3, port, 0.3).join()
    waiting.cancel()
    await asyncio.wait({waiting})


async def test_ranks_that_do_not_agree_on_the_size_are_told() -> None:
    port = free_port()
    task, leader = await come_early(port)
    with pytest.raises(ConfigError, match="rank 1 of 3 came to a group of 2"):
        await joining(1, 3, port).join()
    follower = joining(1, 2, port)
    pipes = await follower.join()
    await close(leader, await task)
    await close(follower, pipes)


async def test_a_rank_that_crashed_on_its_way_may_come_again() -> None:
    port = free_port()
    leader = joining(0, 3, port)
    waiting = asyncio.create_task(leader.join())
    await until_blocked(waiting)
    crashed = asyncio.create_task(joining(1, 3, port).join())
    await asyncio.wait({crashed}, timeout=0.1)
    crashed.cancel()
    ranks = [joining(rank, 3, port) for rank in (1, 2)]
    pipes = await asyncio.gather(*(rank.join() for rank in ranks))
    for rank, found in zip([leader, *ranks], [await waiting, *pipes], strict=True):
        await close(rank, found)


async def test_a_rank_lost_before_it_opened_its_pipes_is_named() -> None:
    port = free_port()
    task, _ = await come_early(port)
    link = await dial(f"tcp://127.0.0.1:{port}", identity=new_identity())
    hearer = Hearer()
    link.open_stream(hearer, JoinGroup(1, 2, "tcp://127.0.0.1:1"))
    await hearer.next()
    link.abort()
    with pytest.raises(PeerLost, match="rank 1 is lost"):
        await task


async def test_a_meeting_answers_nothing_else_and_no_stranger_gets_a_place() -> None:
    port = free_port()
    task, _ = await come_early(port)
    link = await dial(f"tcp://127.0.0.1:{port}", identity=new_identity(), lanes=1)
    hearer = Hearer()
    link.open_stream(hearer, Peek(has_key=False))
    assert "ConfigError" in str(await hearer.next())
    stranger = PipeEnd.dialled(link, 2**20, name="another group/1")
    await until_blocked(task)
    assert not task.done()
    stranger.abort()
    task.cancel()
    await asyncio.wait({task})


async def test_a_port_that_is_taken_is_told_at_once() -> None:
    port = free_port()
    task, _ = await come_early(port)
    with pytest.raises(ConfigError, match="cannot listen"):
        await joining(0, 2, port).join()
    task.cancel()
    await asyncio.wait({task})


@pytest.mark.parametrize("url", ["unix:///run/docker.sock", "mem://x", "tls://h:1"])
async def test_a_rank_cannot_send_the_others_elsewhere(url: str) -> None:
    """A group of TCP is one of TCP, whatever a rank says of where it is."""
    port = free_port()
    leader, last = joining(0, 3, port), joining(2, 3, port)
    ranks = [asyncio.create_task(each.join()) for each in (leader, last)]
    await until_blocked(*ranks)
    link = await dial(f"tcp://127.0.0.1:{port}", identity=new_identity(), lanes=1)
    link.open_stream(Hearer(), JoinGroup(1, 3, url))
    with pytest.raises(ConfigError, match="rank 1 is at"):
        await ranks[1]
    ranks[0].cancel()
    await asyncio.wait({ranks[0]})
    await link.aclose()
