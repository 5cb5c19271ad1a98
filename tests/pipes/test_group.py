from __future__ import annotations

import asyncio
import logging
import math
import secrets
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import asynckv
from asynckv.errors import ConfigError, EndOfStream, PeerLost, RemoteProtocolError
from asynckv.pipes.group import Group, join_group
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
from asynckv.testing import (
    CancelMode,
    Outcome,
    sweep_cancellation,
    until_blocked,
    use_across_tasks,
)
from asynckv.testing.blocked import until
from asynckv.testing.pairs import free_port, open_group
from asynckv.testing.pipe_checks import PIPE_CHECKS, PipeCheck
from harness.forks import ForkServer

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


@pytest.mark.both_loops
@pytest.mark.parametrize("size", [1, 2, 3, 8])
async def test_the_ring_goes_round(size: int) -> None:
    async with open_group(size) as groups:
        assert [group.rank for group in groups] == list(range(size))
        for _ in range(3):
            await asyncio.gather(*map(go_round, groups))


@pytest.mark.both_loops
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


@pytest.mark.both_loops
@pytest.mark.parametrize("check", CHECKS_OF_ONE_SIDE, ids=lambda check: check.__name__)
async def test_the_pipe_of_a_group_of_one_keeps(check: PipeCheck) -> None:
    async with open_group(1) as (group,):
        await check(group.pipe_to(0), group.prev_pipe)


@pytest.mark.both_loops
async def test_ranks_that_share_a_secret_meet(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32) + "\n")
    async with open_group(2, secret_file=secret) as groups:
        await asyncio.gather(*map(go_round, groups))


async def test_ranks_of_one_host_read_what_is_sent_where_it_lies() -> None:
    async with open_group(2) as groups:
        pipes = groups[0].pipe_to(1), groups[1].pipe_to(0)
        await until(lambda: all(pipe.transport == "map" for pipe in pipes))


@pytest.mark.both_loops
async def test_a_group_has_pipes_to_the_other_ranks_only() -> None:
    async with open_group(2) as (group, _):
        with pytest.raises(ValueError, match="0 is this very rank"):
            group.pipe_to(0)
        with pytest.raises(ValueError, match="2 is no rank of a group of 2"):
            group.pipe_to(2)
        assert group.next_pipe is group.prev_pipe is group.pipe_to(1)
        assert repr(group) == "<Group, rank 0 of 2>"


@pytest.mark.both_loops
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
        ({"rank": 0.5}, TypeError),
        ({"size": "2"}, TypeError),
        ({"timeout_s": math.nan}, ValueError),
    ],
)
def test_what_cannot_be_a_group_is_refused(
    options: dict[str, Any], error: type[Exception]
) -> None:
    valid: dict[str, Any] = {"rank": 0, "size": 2, "host": "127.0.0.1", "port": 7000}
    with pytest.raises(error):
        join_group(**{**valid, **options})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "7000"),
        ("port", 7000.0),
        ("port_offset", "1"),
        ("host", None),
        ("allow_plaintext", "false"),
        ("secret_file", 7),
    ],
)
def test_what_is_of_another_type_is_refused_by_its_name(
    name: str, value: object
) -> None:
    valid: dict[str, Any] = {"rank": 0, "size": 2, "host": "127.0.0.1", "port": 7000}
    with pytest.raises(TypeError, match=f"^{name} is "):
        join_group(**{**valid, name: value})


@pytest.mark.both_loops
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


@pytest.mark.both_loops
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


@pytest.mark.both_loops
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("end", ["abort", "aclose"])
async def test_a_rank_that_leaves_blames_no_other_at_its_own_barrier(
    rank: int, end: str
) -> None:
    async with open_group(2) as groups:
        waiting = asyncio.create_task(groups[rank].barrier())
        await until_blocked(waiting)
        if end == "abort":
            groups[rank].abort()
        else:
            await groups[rank].aclose()
        for call in (waiting, groups[rank].barrier()):
            with pytest.raises(PeerLost, match="closed on this side"):
                await call
        groups[1 - rank].abort()


async def test_a_group_of_one_that_was_closed_passes_no_barrier() -> None:
    async with open_group(1) as (group,):
        await group.barrier()
        await group.aclose()
        with pytest.raises(PeerLost, match="closed on this side"):
            await group.barrier()


async def test_who_comes_to_a_group_that_has_broken_up_is_told_at_once() -> None:
    port = free_port()
    async with open_group(3, port=port) as (*_, two):
        await two.aclose()
        with pytest.raises(ConfigError, match="broken up"):
            async with asyncio.timeout(10):
                async with join_group(rank=2, size=3, host="127.0.0.1", port=port):
                    pass


@pytest.mark.both_loops
async def test_a_rank_that_is_left_by_an_error_is_lost_to_the_others() -> None:
    async with open_group(2) as (zero, one):
        with pytest.raises(ZeroDivisionError):
            async with one:
                raise ZeroDivisionError
        with pytest.raises(PeerLost):
            await zero.pipe_to(1).recv_tensor()
        with pytest.raises(PeerLost, match="rank 1 is lost"):
            await zero.barrier()


@pytest.mark.both_loops
async def test_a_group_is_left_in_another_task_than_it_was_entered() -> None:
    await use_across_tasks(open_group(2), lambda groups: groups[0].next_pipe.flush())


@pytest.mark.both_loops
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


@pytest.mark.both_loops
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


@pytest.mark.both_loops
@pytest.mark.multiprocess
async def test_a_rank_that_is_killed_in_the_middle_is_lost_and_named(
    forks: ForkServer,
) -> None:
    port = free_port()
    async with (
        forks.running(SENDING_RANK, str(port)) as process,
        join_group(rank=0, size=2, host="127.0.0.1", port=port) as group,
    ):
        for _ in range(3):
            assert await group.prev_pipe.recv_tensor() is not None
        process.kill()
        with pytest.raises(PeerLost, match="rank 1 is lost"):
            await group.barrier()
        with pytest.raises(PeerLost):
            while True:
                await group.prev_pipe.recv_tensor()


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
