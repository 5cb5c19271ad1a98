from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace

import pytest

from asynckv.errors import ConfigError, PeerLost
from asynckv.links.address import Address, parse_url
from asynckv.links.dial import dial
from asynckv.links.link import LinkStream
from asynckv.links.listen import listen
from asynckv.links.options import new_identity
from asynckv.links.sockets import prepare
from asynckv.links.streams import StreamHandler
from asynckv.pipes.end import PipeEnd
from asynckv.pipes.joining import Joining
from asynckv.pipes.pipe import Pipe
from asynckv.protocol.frames import JoinGroup, Members, OpeningFrame, Peek
from asynckv.testing import until_blocked
from asynckv.testing.pairs import free_port
from harness.link_pairs import Hearer

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
    link.open_stream(hearer, JoinGroup(1, 2, 1))
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


class Rank0:
    """Tells the other ranks anything."""

    def __init__(self, *urls: str) -> None:
        self._members = Members("group", ("", *urls))

    def open(
        self, stream: LinkStream, frame: OpeningFrame, body: bytes
    ) -> StreamHandler:
        stream.send(self._members)
        return Hearer()


@pytest.mark.parametrize("url", ["unix:///run/docker.sock", "mem://x", "tls://h:1"])
async def test_not_even_rank_0_can_send_a_rank_elsewhere(url: str) -> None:
    """A group of TCP is one of TCP, whatever is said of where a rank is."""
    leader = Rank0(url, "")
    listener = await listen(
        "tcp://:0", identity=new_identity(), service_for=lambda link: leader
    )
    last = joining(2, 3, parse_url(listener.url).port)
    with pytest.raises(ConfigError, match="rank 1 is at"):
        await last.join()
    await listener.aclose()


def come_from(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every connection of this process come from ``host``."""

    async def connect(address: Address) -> socket.socket:
        sock = socket.socket()
        sock.bind((host, 0))
        prepare(sock)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (address.host, address.port))
        return sock

    monkeypatch.setattr("asynckv.links.dial.connect", connect)


async def test_a_rank_is_where_rank_0_sees_it_come_from_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    task, _ = await come_early(port)
    come_from("127.0.0.9", monkeypatch)
    link = await dial(f"tcp://127.0.0.1:{port}", identity=new_identity(), lanes=1)
    hearer = Hearer()
    link.open_stream(hearer, JoinGroup(1, 2, 7001))
    members, _ = await hearer.next()
    assert isinstance(members, Members)
    assert members.urls == ("", "tcp://127.0.0.9:7001")
    task.cancel()
    await asyncio.wait({task})
    await link.aclose()


async def test_ranks_of_several_hosts_find_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    come_from("127.0.0.9", monkeypatch)
    port = free_port()
    ranks = [joining(rank, 3, port) for rank in range(3)]
    found = await asyncio.gather(*(rank.join() for rank in ranks))
    for rank, pipes in zip(ranks, found, strict=True):
        assert rank._listener is not None
        host = parse_url(rank._listener.url).host
        assert host == ("127.0.0.9" if rank.rank else "127.0.0.1")
        await close(rank, pipes)


def test_a_rank_that_others_cannot_reach_is_named() -> None:
    last = joining(2, 3, 7000)
    members = Members("group", ("", "tcp://127.0.0.1:7001", ""))
    last._link = SimpleNamespace(own_host="127.0.0.1")  # type: ignore[assignment]
    assert last._url_of(1, members) == members.urls[1]
    last._link = SimpleNamespace(own_host="10.0.0.2")  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="only be reached on that host"):
        last._url_of(1, members)
