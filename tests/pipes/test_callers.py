from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from asynckv.errors import ConfigError, PeerLost
from asynckv.links.address import Address, parse_url
from asynckv.links.dial import dial
from asynckv.links.link import LinkStream
from asynckv.links.listen import listen
from asynckv.links.options import new_identity
from asynckv.links.sockets import prepare
from asynckv.links.streams import StreamHandler
from asynckv.pipes.callers import Callers, Joining
from asynckv.pipes.end import PipeEnd
from asynckv.pipes.pipe import Pipe
from asynckv.protocol.frames import (
    Failure,
    JoinGroup,
    Members,
    OpeningFrame,
    OpenPipe,
    Peek,
)
from asynckv.testing import until, until_blocked
from asynckv.testing.pairs import free_port
from harness.link_pairs import Hearer, LinkPair, ScriptedService, linked

LOST = PeerLost("rank 2 is lost")


class Asked(ScriptedService):
    """Hands each pipe that is opened to ``callers``."""

    def __init__(self) -> None:
        super().__init__()
        self.callers = Callers(2**20, has_gpu=False)

    def open(  # type: ignore[override]
        self, stream: LinkStream, frame: OpeningFrame, body: bytes
    ) -> StreamHandler:
        assert isinstance(frame, OpenPipe)
        return self.callers.arrived(stream, frame)


class Calling(NamedTuple):
    pair: LinkPair
    callers: Callers

    def call(self, name: str) -> Hearer:
        hearer = Hearer()
        self.pair.near.open_stream(hearer, OpenPipe(name))
        return hearer


@pytest.fixture
async def calling() -> AsyncIterator[Calling]:
    service = Asked()
    async with linked(service=service) as pair:
        yield Calling(pair, service.callers)
        service.callers.abort()


async def test_who_has_called_is_taken_once_by_name(calling: Calling) -> None:
    calling.call("group/1")
    end = await calling.callers.taken("group/1")
    assert end.link is calling.pair.far and calling.callers.of(end.link) is None
    end.abort()


async def test_who_has_not_called_yet_is_waited_for(calling: Calling) -> None:
    waiting = asyncio.create_task(calling.callers.taken("group/1"))
    calling.call("group/2")
    await until(lambda: calling.callers.of(calling.pair.far) is not None)
    await until_blocked(waiting)
    calling.call("group/1")
    (await waiting).abort()


async def test_a_cancelled_call_takes_nobody(calling: Calling) -> None:
    waiting = asyncio.create_task(calling.callers.taken("group/1"))
    await until_blocked(waiting)
    calling.call("group/1")
    waiting.cancel()
    await asyncio.wait({waiting})
    (await calling.callers.taken("group/1")).abort()


async def test_when_the_group_has_ended_nobody_is_waited_for(calling: Calling) -> None:
    waiting = asyncio.create_task(calling.callers.taken("group/1"))
    await until_blocked(waiting)
    calling.callers.fail(LOST)
    with pytest.raises(PeerLost, match="rank 2"):
        await waiting
    calling.callers.hope_again()
    calling.call("group/1")
    (await calling.callers.taken("group/1")).abort()


@pytest.mark.parametrize("most", [1, 1024])
async def test_a_second_pipe_of_a_rank_and_one_too_many_are_refused(
    monkeypatch: pytest.MonkeyPatch, calling: Calling, most: int
) -> None:
    monkeypatch.setattr("asynckv.pipes.callers._MAX_CALLERS", most)
    calling.call("group/1")
    frame, _ = await calling.call("group/1" if most > 1 else "group/2").next()
    assert isinstance(frame, Failure) and "already" in frame.message


async def test_who_was_not_taken_is_hung_up_on(calling: Calling) -> None:
    calling.call("group/1")
    await until(lambda: calling.callers.of(calling.pair.far) is not None)
    calling.callers.abort()
    await until(lambda: not calling.pair.near.is_open)


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


@pytest.mark.both_loops
async def test_rank_0_may_come_last() -> None:
    port = free_port()
    follower = joining(1, 2, port)
    early = asyncio.create_task(follower.join())
    await asyncio.wait({early}, timeout=0.1)
    task, leader = await come_early(port)
    await close(leader, await task)
    await close(follower, await early)


@pytest.mark.both_loops
@pytest.mark.parametrize("missing", [0, 1, 2])
async def test_a_rank_that_never_comes_is_named_by_all_others(missing: int) -> None:
    port = free_port()
    ranks = [joining(rank, 3, port, 0.3) for rank in range(3) if rank != missing]
    found = await asyncio.gather(*(r.join() for r in ranks), return_exceptions=True)
    assert all(isinstance(error, PeerLost) for error in found)
    assert all(f"rank {missing} " in str(error) for error in found)
    assert all("within 0.3 s" in str(error) for error in found)


@pytest.mark.both_loops
async def test_a_rank_that_gives_up_early_knows_who_is_missing() -> None:
    port = free_port()
    leader = joining(0, 3, port)
    waiting = asyncio.create_task(leader.join())
    await until_blocked(waiting)
    with pytest.raises(PeerLost, match="rank 1: rank 2 of 3 did not come"):
        await joining(1, 3, port, 0.3).join()
    waiting.cancel()
    await asyncio.wait({waiting})


@pytest.mark.both_loops
async def test_who_has_given_up_waiting_is_not_blamed_for_who_never_came() -> None:
    port = free_port()
    waiting = asyncio.create_task(joining(0, 3, port, 1.0).join())
    await until_blocked(waiting)
    with pytest.raises(PeerLost, match="rank 1: rank 2 of 3 did not come"):
        await joining(1, 3, port, 0.3).join()
    with pytest.raises(PeerLost, match="rank 0: rank 2 of 3 did not come"):
        await waiting


@pytest.mark.both_loops
async def test_ranks_that_do_not_agree_on_the_size_are_told() -> None:
    port = free_port()
    task, leader = await come_early(port)
    with pytest.raises(ConfigError, match="rank 1 of 3 came to a group of 2"):
        await joining(1, 3, port).join()
    follower = joining(1, 2, port)
    pipes = await follower.join()
    await close(leader, await task)
    await close(follower, pipes)


@pytest.mark.both_loops
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


@pytest.mark.both_loops
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


@pytest.mark.both_loops
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


@pytest.mark.both_loops
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


@pytest.mark.both_loops
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


@pytest.mark.both_loops
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


@pytest.mark.both_loops
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


@pytest.mark.both_loops
def test_a_rank_that_others_cannot_reach_is_named() -> None:
    last = joining(2, 3, 7000)
    members = Members("group", ("", "tcp://127.0.0.1:7001", ""))
    last._link = SimpleNamespace(own_host="127.0.0.1")  # type: ignore[assignment]
    assert last._url_of(1, members) == members.urls[1]
    last._link = SimpleNamespace(own_host="10.0.0.2")  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="only be reached on that host"):
        last._url_of(1, members)
