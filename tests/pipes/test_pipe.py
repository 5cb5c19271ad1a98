from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator
from typing import Final

import pytest
import torch

from asynckv.errors import ChecksumError, EndOfStream, PeerLost, PipeBroken, WrongLoop
from asynckv.links.link import LinkStream
from asynckv.pipes import pipe as pipe_module
from asynckv.pipes.end import PipeEnd
from asynckv.pipes.outbound import MAX_TENSORS
from asynckv.pipes.pipe import Pipe, PipeStatistics, ReportedErrors
from asynckv.protocol.frames import (
    Accepted,
    Commit,
    Failure,
    Flushed,
    Frame,
    OpenPipe,
    Push,
    Read,
)
from asynckv.tensors.slabs import has_slabs
from asynckv.testing import (
    CancelMode,
    Outcome,
    sweep_cancellation,
    until,
    until_blocked,
    use_across_tasks,
)
from asynckv.testing.pairs import SCHEMES, Scheme, open_pipe_pair
from asynckv.testing.pipe_checks import PIPE_CHECKS, PipeCheck
from asynckv.types import TensorSpec
from harness.link_pairs import Hearer, linked
from harness.slab_gate import SlabGate

BOUND: Final = 2**20
LARGE: Final = 2**18
IDLE: Final = PipeStatistics(BOUND, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)


def large(seed: int = 0) -> torch.Tensor:
    return torch.arange(seed, seed + LARGE // 4, dtype=torch.int32)


async def fill(near: Pipe, far: Pipe) -> None:
    """Send until both bounds are reached, and wait until all is where it stays."""
    for _ in range(8):
        await near.send_tensor(large())
    await until(lambda: near.statistics().in_flight_bytes == BOUND)
    await until(lambda: far.statistics().held_bytes == BOUND)


@pytest.mark.both_loops
@pytest.mark.parametrize("call", ["send_tensor", "recv_tensor", "flush"])
async def test_a_pipe_belongs_to_the_loop_on_which_it_was_opened(call: str) -> None:
    async with open_pipe_pair("mem") as (near, far):

        def call_from_another_loop() -> None:
            asyncio.run(getattr(near, call)(*[None][: call == "send_tensor"]))

        with pytest.raises(WrongLoop):
            await asyncio.to_thread(call_from_another_loop)
        await near.send_tensor(torch.ones(3))
        assert await far.recv_tensor() is not None


@pytest.mark.both_loops
async def test_statistics_tell_what_is_where() -> None:
    async with open_pipe_pair("mem") as (near, far):
        assert near.statistics() == far.statistics() == IDLE
        await fill(near, far)
        waits = near.statistics().room_waits
        waiting = asyncio.create_task(near.send_tensor(torch.zeros(1)))
        await until_blocked(waiting)
        sent = near.statistics()
        assert (sent.sent_tensors, sent.in_flight_tensors) == (8, 4)
        assert (sent.room_waits - waits, sent.waiting_senders) == (1, 1)
        for _ in range(9):
            await far.recv_tensor()
        await waiting
        await near.flush()
        assert near.statistics().in_flight_bytes == 0
        assert far.statistics().received_bytes == 8 * LARGE + 4


@pytest.mark.both_loops
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_refused_or_failed_send_gives_its_room_back(scheme: Scheme) -> None:
    async with open_pipe_pair(scheme) as (near, far):
        for tensor in (torch.ones((1,) * 15), torch.eye(2).to_sparse()):
            with pytest.raises(ValueError, match="tensor"):
                await near.send_tensor(tensor)
        await fill(near, far)
        far.abort()
        with pytest.raises(PipeBroken):
            await near.send_tensor(large())
        assert near.statistics().in_flight_bytes == 0
        assert near.statistics().in_flight_tensors == 0


@pytest.mark.both_loops
async def test_a_wait_on_a_full_pipe_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_pipe_pair("mem") as (near, far):
        await fill(near, far)
        with caplog.at_level(logging.DEBUG, logger="asynckv.observability.waits"):
            waiting = asyncio.create_task(near.send_tensor(large()))
            await until_blocked(waiting)
            for _ in range(9):
                await far.recv_tensor()
            await waiting
        (record,) = caplog.records
        assert record.message.startswith(
            "send_tensor of 262144 bytes waits for room in a pipe of 1048576 bytes"
        )


@pytest.mark.both_loops
async def test_left_by_an_error_the_peer_does_not_take_it_for_the_end() -> None:
    async with open_pipe_pair() as (near, far):
        await near.send_tensor(None)
        await near.flush()
        with pytest.raises(ZeroDivisionError):
            async with near:
                raise ZeroDivisionError
        assert await far.recv_tensor() is None
        with pytest.raises(PeerLost):
            await far.recv_tensor()


@pytest.mark.both_loops
async def test_closing_waits_until_the_peer_has_everything() -> None:
    async with open_pipe_pair() as (near, far):
        for seed in range(8):
            await near.send_tensor(large(seed))
        closing = asyncio.create_task(near.aclose())
        received = [tensor async for tensor in far]
        await closing
        assert [int(t[0]) for t in received if t is not None] == list(range(8))


@pytest.mark.both_loops
async def test_a_peer_that_takes_nothing_cannot_keep_a_pipe_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipe_module, "_DRAIN_S", 0.05)
    async with open_pipe_pair() as (near, far):
        await fill(near, far)
        with pytest.raises(PipeBroken, match="flush") as caught:
            await near.aclose()
        assert caught.value.maybe_delivered == 4
        await near.aclose()
        for _ in range(4):
            await far.recv_tensor()
        with pytest.raises(PeerLost):
            await far.recv_tensor()


@pytest.mark.both_loops
async def test_closing_tells_a_loss_that_nobody_was_told_of() -> None:
    async with open_pipe_pair() as (near, far):
        await near.send_tensor(large())
        far.abort()
        with pytest.raises(PipeBroken):
            await near.aclose()
        await near.aclose()


@pytest.mark.both_loops
async def test_closing_does_not_tell_a_loss_twice() -> None:
    async with open_pipe_pair() as (near, far):
        far.abort()
        with pytest.raises(PeerLost):
            await near.recv_tensor()
        await near.aclose()


@pytest.mark.both_loops
async def test_closing_while_others_send_and_receive_ends_them() -> None:
    async with open_pipe_pair() as (near, far):
        await fill(near, far)
        sending = asyncio.create_task(near.send_tensor(large()))
        receiving = asyncio.create_task(near.recv_tensor())
        await until_blocked(sending, receiving)
        closing = asyncio.create_task(near.aclose())
        with pytest.raises(EndOfStream):
            await sending
        for _ in range(8):
            await far.recv_tensor()
        await closing
        with pytest.raises(EndOfStream):
            await receiving


@pytest.mark.both_loops
async def test_a_loop_over_small_tensors_lets_others_run() -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async with open_pipe_pair("mem") as (near, _):
        ticking = asyncio.create_task(tick())
        for _ in range(1000):
            await near.send_tensor(None)
        assert ticks >= 30
        ticking.cancel()
        await near.flush()


@pytest.mark.both_loops
async def test_a_tensor_in_the_copy_does_not_hold_small_ones_of_the_peer() -> None:
    async with open_pipe_pair() as (near, far):
        sending = asyncio.create_task(near.send_tensor(torch.zeros(2**24)))
        await far.send_tensor(torch.ones(1))
        await near.recv_tensor()
        await far.recv_tensor()
        await sending


@pytest.mark.both_loops
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_digests_can_be_off(scheme: Scheme) -> None:
    async with open_pipe_pair(scheme, digest="off") as (near, far):
        for tensor in (large(), torch.ones(3)):
            await near.send_tensor(tensor)
            found = await far.recv_tensor()
            assert found is not None
            assert torch.equal(found, tensor)


@pytest.mark.both_loops
async def test_a_cancelled_close_leaves_nothing_half_closed() -> None:
    pairs: list[tuple[Pipe, Pipe]] = []
    managers = []

    async def before() -> None:
        managers.append(open_pipe_pair("unix"))
        pairs.append(await managers[-1].__aenter__())
        await pairs[-1][0].send_tensor(large())

    async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
        near, far = pairs[-1]
        if not k:
            await near.aclose()
        with pytest.raises((PeerLost, EndOfStream)):
            await near.send_tensor(None)
        received = [far.recv_tensor(), far.recv_tensor()]
        found = await asyncio.gather(*received, return_exceptions=True)
        assert isinstance(found[1], (PeerLost, EndOfStream))
        await managers.pop().__aexit__(None, None, None)

    await sweep_cancellation(lambda: pairs[-1][0].aclose(), check, before=before)


@pytest.mark.both_loops
async def test_a_pipe_is_left_in_another_task_than_it_was_entered() -> None:
    await use_across_tasks(open_pipe_pair("mem"), lambda pair: pair[0].flush())


@pytest.mark.both_loops
async def test_a_pipe_says_who_the_peer_is_and_how_bytes_move() -> None:
    async with open_pipe_pair("mem") as (near, far):
        assert near.transport == far.transport == "mem"
        assert near.peer != far.peer
        assert "Link to" in repr(near)


@pytest.mark.both_loops
@pytest.mark.parametrize("check", [c for c in PIPE_CHECKS if "cancelled" in c.__name__])
async def test_after_any_cancellation_the_budget_is_exact(
    check: PipeCheck,
) -> None:
    async with open_pipe_pair("unix") as (near, far):
        await check(near, far)
        await near.flush()
        for pipe in (near, far):
            found = pipe.statistics()
            assert (found.in_flight_bytes, found.in_flight_tensors) == (0, 0)
            assert (found.held_bytes, found.held_tensors) == (0, 0)
            assert found.waiting_senders == 0


@pytest.mark.both_loops
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("seed", range(3))
async def test_whatever_is_cancelled_nothing_is_lost_repeated_or_reordered(
    scheme: Scheme, seed: int
) -> None:
    chance = random.Random(seed)
    sent: list[int] = []
    received: list[int] = []

    async def send(pipe: Pipe, number: int) -> None:
        nbytes = chance.choice((1, 2**14, 2**16, 2**17))
        await pipe.send_tensor(torch.full((nbytes,), number, dtype=torch.int64))
        sent.append(number)

    async def receive(pipe: Pipe) -> None:
        tensor = await pipe.recv_tensor()
        assert tensor is not None
        assert bool((tensor == tensor[0]).all())
        received.append(int(tensor[0]))

    async with open_pipe_pair(scheme) as (near, far):
        for number in range(100):
            task = asyncio.create_task(
                send(near, number) if chance.random() < 0.5 else receive(far)
            )
            await asyncio.wait({task}, timeout=chance.choice((0, 0.002)))
            task.cancel()
            await asyncio.wait({task})
        await asyncio.gather(
            near.aclose(), *(receive(far) for _ in sent[len(received) :])
        )
    assert received == sent


@pytest.mark.both_loops
async def test_what_is_no_tensor_is_refused_by_name() -> None:
    async with open_pipe_pair("mem") as (near, _):
        with pytest.raises(TypeError, match="not 3"):
            await near.send_tensor(3)  # type: ignore[arg-type]


LOST = PipeBroken("the peer is lost", maybe_delivered=0)
LOST_WITH_SOME = PipeBroken("the peer is lost", maybe_delivered=1)


def test_nobody_has_heard_of_anything_at_first_and_then_of_it_once() -> None:
    told = ReportedErrors()
    assert not told.has(LOST)
    assert told.has(LOST) and told.has(LOST_WITH_SOME)


@pytest.mark.parametrize("error", [PeerLost("gone"), ChecksumError("changed")])
def test_who_has_heard_of_a_loss_has_not_heard_what_may_not_have_arrived(
    error: Exception,
) -> None:
    told = ReportedErrors()
    told.note(error)
    assert not told.has(LOST_WITH_SOME)
    told = ReportedErrors()
    told.note(error)
    assert told.has(LOST)


def test_another_error_tells_nothing_of_the_end() -> None:
    told = ReportedErrors()
    told.note(ValueError("no tensor"))
    assert not told.has(LOST)


def test_who_has_hung_up_is_told_nothing() -> None:
    told = ReportedErrors()
    told.note_all()
    assert told.has(LOST_WITH_SOME)


SPEC = TensorSpec((8,), "uint8")


class Peer:
    """The other side of a pipe, frame by frame."""

    def __init__(self, stream: LinkStream, hearer: Hearer) -> None:
        self.stream = stream
        self.hearer = hearer

    def send(self, frame: Frame, body: bytes = b"") -> None:
        self.stream.send(frame, body)


@contextlib.asynccontextmanager
async def piped(digest: str = "full") -> AsyncIterator[tuple[Pipe, Peer]]:
    """A pipe that has dialled, and whoever it has reached."""
    options = {"digest": digest}
    async with linked("mem://", lambda *asked: None, near=options, far=options) as pair:
        end = PipeEnd.dialled(pair.near, 2**20, name="rank")
        pipe = Pipe(end, end)
        await until(lambda: bool(pair.service.asked))
        stream, frame, _ = pair.service.asked[0]
        assert frame == OpenPipe("rank")
        try:
            yield pipe, Peer(stream, pair.service.hearers[0])
        finally:
            pipe.abort()
            await pipe.aclose()


async def test_a_dialled_end_gives_the_peer_room_at_once() -> None:
    async with piped() as (_, peer):
        frame, _ = await peer.hearer.next()
        assert frame == Read(2**20, MAX_TENSORS)


@pytest.mark.both_loops
async def test_changed_bytes_break_the_pipe_on_both_sides() -> None:
    async with piped() as (pipe, peer):
        peer.send(Push(0, 0, True, SPEC, b"wrong"), bytes(8))
        with pytest.raises(ChecksumError, match="pipe is broken"):
            await pipe.recv_tensor()
        await until(lambda: len(peer.hearer.frames) == 2)
        failure, _ = peer.hearer.frames[-1]
        assert isinstance(failure, Failure)
        assert failure.code == "ChecksumError"
        with pytest.raises(PipeBroken, match="other bytes"):
            await pipe.send_tensor(None)


@pytest.mark.both_loops
async def test_without_digests_nothing_is_compared() -> None:
    async with piped(digest="off") as (pipe, peer):
        peer.send(Push(0, 0, True, SPEC), bytes(8))
        found = await pipe.recv_tensor()
        assert found is not None
        assert found.tolist() == [0] * 8


@pytest.mark.both_loops
async def test_a_peer_that_found_changed_bytes_breaks_the_pipe_here() -> None:
    async with piped() as (pipe, peer):
        await pipe.send_tensor(None)
        peer.send(Failure("ChecksumError", "tensor 1 changed"))
        with pytest.raises(PeerLost, match="tensor 1 changed"):
            await pipe.recv_tensor()
        with pytest.raises(PipeBroken) as caught:
            await pipe.flush()
        assert caught.value.maybe_delivered == 1


@pytest.mark.both_loops
@pytest.mark.parametrize("frame", [Commit(), Accepted(), Flushed(1)])
async def test_a_frame_that_makes_no_sense_breaks_the_link(frame: Frame) -> None:
    async with piped() as (pipe, peer):
        peer.send(frame)
        with pytest.raises(PeerLost):
            await pipe.recv_tensor()
        assert not peer.stream.link.is_open


@pytest.mark.both_loops
async def test_what_was_verified_is_said_before_the_goodbye() -> None:
    async with piped() as (pipe, peer):
        await peer.hearer.next()
        peer.send(Push(inline=True))
        assert await pipe.recv_tensor() is None
        await pipe.aclose()
        await until(lambda: bool(peer.hearer.losses))
        assert Flushed(1) in [frame for frame, _ in peer.hearer.frames]
        assert peer.hearer.losses[0].goodbye


@pytest.mark.both_loops
@pytest.mark.skipif(not has_slabs(), reason="no memory files here")
@pytest.mark.parametrize("scheme", ["tcp", "mem"])
@pytest.mark.parametrize("end", ["abort", "aclose"])
async def test_a_send_that_waits_for_memory_learns_that_its_side_was_closed(
    scheme: Scheme, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_pipe_pair(scheme) as (near, far):
        gate = SlabGate(monkeypatch)
        sending = asyncio.create_task(near.send_tensor(large()))
        await until(gate.asked.is_set)
        if end == "abort":
            near.abort()
            far.abort()
            gate.is_open.set()
            with pytest.raises(PipeBroken, match="aborted on this side"):
                await sending
        else:
            closing = asyncio.create_task(near.aclose())
            await until_blocked(closing)
            gate.is_open.set()
            with pytest.raises(EndOfStream, match="closed on this side"):
                await sending
            await closing


@pytest.mark.both_loops
async def test_an_aborted_end_gives_nothing_that_it_had_received() -> None:
    async with piped() as (pipe, peer):
        peer.send(Push(inline=True))
        await until(lambda: pipe.statistics().held_tensors == 1)
        pipe.abort()
        with pytest.raises(PeerLost, match="aborted on this side"):
            await pipe.recv_tensor()


@pytest.mark.both_loops
async def test_a_peer_that_says_goodbye_in_the_middle_is_lost() -> None:
    async with piped() as (pipe, peer):
        large = TensorSpec((2**18,), "uint8")
        peer.send(Push(inline=True))
        peer.send(Push(4, 0, False, large))
        await until(lambda: pipe.statistics().held_tensors == 2)
        await peer.stream.link.aclose()
        assert await pipe.recv_tensor() is None
        with pytest.raises(PeerLost):
            await pipe.recv_tensor()
        with pytest.raises(EndOfStream):
            await pipe.send_tensor(None)
