from __future__ import annotations

import asyncio
import logging
import random
from typing import Final

import pytest
import torch

from asynckv.errors import EndOfStream, PeerLost, PipeBroken, WrongLoop
from asynckv.pipes import pipe as pipe_module
from asynckv.pipes.pipe import Pipe, PipeStatistics
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

pytestmark = pytest.mark.both_loops

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


async def test_a_pipe_belongs_to_the_loop_on_which_it_was_opened() -> None:
    async with open_pipe_pair("mem") as (near, far):

        def send_from_another_loop(pipe: Pipe) -> None:
            asyncio.run(pipe.send_tensor(torch.ones(3)))

        for pipe in (near, far):
            with pytest.raises(WrongLoop):
                await asyncio.to_thread(send_from_another_loop, pipe)
        await near.send_tensor(torch.ones(3))
        assert await far.recv_tensor() is not None


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


async def test_closing_waits_until_the_peer_has_everything() -> None:
    async with open_pipe_pair() as (near, far):
        for seed in range(8):
            await near.send_tensor(large(seed))
        closing = asyncio.create_task(near.aclose())
        received = [tensor async for tensor in far]
        await closing
        assert [int(t[0]) for t in received if t is not None] == list(range(8))


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


async def test_closing_tells_a_loss_that_nobody_was_told_of() -> None:
    async with open_pipe_pair() as (near, far):
        await near.send_tensor(large())
        far.abort()
        with pytest.raises(PipeBroken):
            await near.aclose()
        await near.aclose()


async def test_closing_does_not_tell_a_loss_twice() -> None:
    async with open_pipe_pair() as (near, far):
        far.abort()
        with pytest.raises(PeerLost):
            await near.recv_tensor()
        await near.aclose()


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


async def test_a_tensor_in_the_copy_does_not_hold_small_ones_of_the_peer() -> None:
    async with open_pipe_pair() as (near, far):
        sending = asyncio.create_task(near.send_tensor(torch.zeros(2**24)))
        await far.send_tensor(torch.ones(1))
        await near.recv_tensor()
        await far.recv_tensor()
        await sending


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_digests_can_be_off(scheme: Scheme) -> None:
    async with open_pipe_pair(scheme, digest="off") as (near, far):
        for tensor in (large(), torch.ones(3)):
            await near.send_tensor(tensor)
            found = await far.recv_tensor()
            assert found is not None
            assert torch.equal(found, tensor)


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


async def test_a_pipe_is_left_in_another_task_than_it_was_entered() -> None:
    await use_across_tasks(open_pipe_pair("mem"), lambda pair: pair[0].flush())


def test_a_pipe_belongs_to_one_loop() -> None:
    async def use() -> Pipe:
        async with open_pipe_pair("mem") as (near, _):
            await near.flush()
            return near

    near = asyncio.run(use())
    with pytest.raises(WrongLoop):
        asyncio.run(near.flush())


async def test_a_pipe_says_who_the_peer_is_and_how_bytes_move() -> None:
    async with open_pipe_pair("mem") as (near, far):
        assert near.transport == far.transport == "mem"
        assert near.peer != far.peer
        assert "Link to" in repr(near)


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


async def test_what_is_no_tensor_is_refused_by_name() -> None:
    async with open_pipe_pair("mem") as (near, _):
        with pytest.raises(TypeError, match="not 3"):
            await near.send_tensor(3)  # type: ignore[arg-type]
