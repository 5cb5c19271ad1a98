from __future__ import annotations

import asyncio
import logging
from typing import Any, Literal

import pytest

from asynckv.errors import ConfigError, PeerLost, RemoteProtocolError
from asynckv.pipes.rendezvous import Barrier, Follower, Leader, name_ranks
from asynckv.protocol.frames import (
    Accepted,
    Arrived,
    Cancelled,
    Commit,
    Failure,
    Frame,
    JoinGroup,
    Members,
    Missing,
)
from asynckv.testing import until_blocked


class Told(Barrier):
    """A barrier that keeps what it says."""

    def __init__(self) -> None:
        self.said: list[int] = []
        super().__init__(self.said.append)


async def test_a_rank_says_that_it_came_and_passes_when_it_is_told() -> None:
    barrier = Told()
    for number in (1, 2):
        waiting = asyncio.create_task(barrier.wait())
        await until_blocked(waiting)
        assert barrier.said[-1] == number
        barrier.release(number)
        await waiting
    assert barrier.said == [1, 2]


async def test_a_barrier_may_open_while_the_last_rank_comes() -> None:
    barrier = Barrier(lambda number: barrier.release(number))
    await barrier.wait()
    await barrier.wait()
    assert barrier.released == 2


@pytest.mark.parametrize("released_meanwhile", [False, True])
async def test_after_a_cancellation_the_next_call_waits_at_the_same_barrier(
    released_meanwhile: bool,
) -> None:
    barrier = Told()
    cancelled = asyncio.create_task(barrier.wait())
    await until_blocked(cancelled)
    cancelled.cancel()
    await asyncio.wait({cancelled})
    if released_meanwhile:
        barrier.release(1)
    again = asyncio.create_task(barrier.wait())
    await until_blocked(again)
    if not released_meanwhile:
        barrier.release(1)
    await again
    assert barrier.said == [1]


async def test_calls_at_the_same_time_wait_at_the_same_barrier() -> None:
    barrier = Told()
    tasks = [asyncio.create_task(barrier.wait()) for _ in range(2)]
    await until_blocked(*tasks)
    barrier.release(1)
    await asyncio.gather(*tasks)
    assert barrier.said == [1]


async def test_a_lost_rank_ends_every_wait() -> None:
    barrier = Told()
    waiting = asyncio.create_task(barrier.wait())
    await until_blocked(waiting)
    barrier.end(PeerLost("rank 2 is lost"))
    for call in (waiting, barrier.wait()):
        with pytest.raises(PeerLost, match="rank 2"):
            await call


@pytest.mark.parametrize("number", [0, 1, 2])
async def test_a_release_that_makes_no_sense_is_a_lie(number: int) -> None:
    with pytest.raises(RemoteProtocolError):
        Told().release(number)


async def test_the_wait_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    barrier = Told()
    with caplog.at_level(logging.DEBUG):
        waiting = asyncio.create_task(barrier.wait())
        await until_blocked(waiting)
    barrier.release(1)
    await waiting
    assert "barrier 1 waits for every rank to come" in caplog.text


BYE = PeerLost("goodbye")
BYE.goodbye = True


class Stream:
    """A stream that keeps what was sent; as a link it opens itself."""

    def __init__(self, peer_host: str = "") -> None:
        self.link = self
        self.peer_host = peer_host
        self.sent: list[Frame] = []
        self.is_closed = False

    def send(self, frame: Frame, body: bytes = b"") -> None:
        self.sent.append(frame)

    def close(self) -> None:
        self.is_closed = True

    def open_stream(self, handler: object, frame: Frame) -> Stream:
        self.sent.append(frame)
        return self


class Meeting:
    """Rank 0, and how the group ended."""

    def __init__(self, size: int, scheme: Literal["tcp", "tls"] = "tcp") -> None:
        self.ended: list[PeerLost] = []
        self.leader = Leader(size, self.ended.append, scheme)

    def come(
        self, rank: int, *, size: int | None = None, host: str = ""
    ) -> tuple[Any, Stream]:
        stream = Stream(host)
        frame = JoinGroup(rank, size or self.leader.size, 7000 + rank)
        return self.leader.seat(stream, frame), stream  # type: ignore[arg-type]

    async def all_come(self) -> list[tuple[Any, Stream]]:
        seats = [self.come(rank) for rank in range(1, self.leader.size)]
        await self.leader.members()
        return seats


def follow(rank: int, size: int) -> tuple[Follower, Stream, list[PeerLost]]:
    link, ended = Stream(), list[PeerLost]()
    follower = Follower(link, rank, size, 7001, ended.append)  # type: ignore[arg-type]
    return follower, link, ended


def test_ranks_are_named_in_a_sentence() -> None:
    assert name_ranks((3,)) == "rank 3"
    assert name_ranks((1, 2)) == "ranks 1 and 2"
    assert name_ranks((1, 2, 5)) == "ranks 1, 2 and 5"


async def test_everybody_is_told_who_is_missing_and_then_where_all_are() -> None:
    meeting = Meeting(3)
    _, second = meeting.come(2)
    await asyncio.sleep(0)
    assert second.sent == [Missing((1,))]
    assert meeting.leader.missing == (1,)
    _, first = meeting.come(1)
    members = await meeting.leader.members()
    assert members.urls == ("", "tcp://127.0.0.1:7001", "tcp://127.0.0.1:7002")
    assert second.sent[-1] == first.sent[-1] == members


async def test_everybody_is_where_rank_0_sees_it_come_from() -> None:
    meeting = Meeting(4, "tls")
    for rank, host in enumerate(("127.0.0.1", "10.0.0.2", "fd00::3"), 1):
        meeting.come(rank, host=host)
    _, *urls = (await meeting.leader.members()).urls
    assert urls == [
        "tls://127.0.0.1:7001",
        "tls://10.0.0.2:7002",
        "tls://[fd00::3]:7003",
    ]


@pytest.mark.parametrize(("rank", "size"), [(0, 3), (3, 3), (1, 4)])
async def test_a_rank_of_another_group_is_refused(rank: int, size: int) -> None:
    with pytest.raises(ConfigError, match="came to a group of 3"):
        Meeting(3).come(rank, size=size)


async def test_no_two_have_the_same_rank() -> None:
    meeting = Meeting(3)
    meeting.come(1)
    with pytest.raises(ConfigError, match="rank 1 is here already"):
        meeting.come(1)


@pytest.mark.parametrize("frame", [Arrived(2), Arrived(0), Commit()])
async def test_what_makes_no_sense_from_a_member_is_a_lie(frame: Frame) -> None:
    seat, _ = (await Meeting(2).all_come())[0]
    with pytest.raises(RemoteProtocolError):
        seat.on_frame(frame, b"")


@pytest.mark.parametrize(
    ("error", "words"), [(PeerLost("cut"), "is lost: cut"), (BYE, "has left the group")]
)
async def test_a_member_that_is_gone_is_named_to_all(
    error: PeerLost, words: str
) -> None:
    meeting = Meeting(3)
    (_, first), (two, _) = await meeting.all_come()
    two.on_lost(error)
    assert first.sent[-1] == Failure("PeerLost", f"rank 2 {words}")
    assert first.is_closed
    assert words in str(meeting.ended[0])
    with pytest.raises(PeerLost, match="rank 2"):
        await meeting.leader.barrier.wait()


async def test_a_follower_comes_learns_and_passes_barriers() -> None:
    follower, link, _ = follow(1, 2)
    assert link.sent == [JoinGroup(1, 2, 7001)]
    follower.on_frame(Missing((2,)), b"")
    assert follower.missing == (2,)
    members = Members("group", ("", "tcp://me:1"))
    follower.on_frame(members, b"")
    assert await follower.members() == members
    waiting = asyncio.create_task(follower.barrier.wait())
    await until_blocked(waiting)
    assert link.sent[-1] == Arrived(1)
    follower.on_frame(Arrived(1), b"")
    await waiting


async def test_a_follower_that_is_refused_says_why() -> None:
    follower, _, ended = follow(1, 2)
    follower.on_frame(Failure("ConfigError", "rank 1 is here already"), b"")
    assert follower.was_refused
    with pytest.raises(ConfigError, match="already"):
        await follower.members()
    assert "already" in str(ended[0])


@pytest.mark.parametrize("error", [PeerLost("cut"), BYE])
async def test_a_follower_that_lost_rank_0_says_so(error: PeerLost) -> None:
    follower, _, ended = follow(1, 2)
    follower.on_frame(Members("group", ("", "")), b"")
    follower.on_lost(error)
    with pytest.raises(PeerLost, match="rank 0"):
        await follower.barrier.wait()
    assert len(ended) == 1
    assert not follower.was_refused


@pytest.mark.parametrize(
    "frame", [Members("group", ("",)), Arrived(1), Commit(), Missing((1,))]
)
async def test_a_follower_hears_only_what_makes_sense(frame: Frame) -> None:
    follower, _, _ = follow(1, 2)
    if isinstance(frame, Missing):
        follower.on_frame(frame, b"")
        return
    with pytest.raises(RemoteProtocolError):
        follower.on_frame(frame, b"")


async def test_a_cancelled_wait_for_the_members_leaves_no_trace() -> None:
    meeting = Meeting(2)
    waiting = asyncio.create_task(meeting.leader.members())
    await until_blocked(waiting)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert meeting.leader.missing == (1,)
    meeting.come(1)
    await meeting.leader.members()


@pytest.mark.parametrize("last", [Cancelled(), Accepted()])
async def test_a_follower_whose_stream_is_ended_without_reason_waits_no_longer(
    last: Frame,
) -> None:
    follower, _, ended = follow(1, 2)
    with pytest.raises(RemoteProtocolError):
        follower.on_frame(last, b"")
    with pytest.raises(RemoteProtocolError):
        await follower.members()
    assert len(ended) == 1
