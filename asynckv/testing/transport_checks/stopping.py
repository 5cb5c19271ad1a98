"""A transfer that is stopped, on either side and at any moment, leaves memory alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final

import anyio

from asynckv.protocol.digests import digest_of
from asynckv.testing.blocked import until
from asynckv.testing.expectations import expect
from asynckv.testing.transport_checks.sides import (
    LARGE,
    MakeTransportPair,
    Side,
    TransportCheck,
    after_turns,
    memory,
    noise,
    open_sides,
)

__all__ = (
    "STOPPING_CHECKS",
    "a_callback_may_stop_its_own_transfer",
    "a_quiet_source_may_be_overwritten",
    "a_quiet_target_is_not_written_to",
    "both_sides_may_stop_at_once",
    "memory_is_let_go",
    "quiet_is_at_once_where_nothing_moves",
    "what_comes_for_a_stopped_transfer_is_dropped",
    "what_was_announced_and_is_not_received_is_dropped",
)

_TURNS: Final = (0, 1, 5, 30, 300)
_OVERWRITE: Final = 9


async def _quiesce(side: Side) -> None:
    await side.quiesce(1)


async def _quiesce_in_a_cancelled_task(side: Side) -> None:
    side.stop(1)
    task = asyncio.create_task(side.transport.quiesce(1))
    for _ in range(3):
        await after_turns(1)
        task.cancel()
    await asyncio.wait({task})


async def _quiesce_in_a_cancelled_scope(side: Side) -> None:
    side.stop(1)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await side.transport.quiesce(1)


_WAYS: Final[tuple[Callable[[Side], Awaitable[None]], ...]] = (
    _quiesce,
    _quiesce_in_a_cancelled_task,
    _quiesce_in_a_cancelled_scope,
)


async def a_quiet_source_may_be_overwritten(make_pair: MakeTransportPair) -> None:
    """Nothing written to it afterwards reaches the peer, however it was waited for."""
    sources = [memory(LARGE) for _ in range(2)]
    targets = [memory(LARGE) for _ in sources]
    for quiesce in _WAYS:
        for turns in _TURNS:
            async with open_sides(make_pair) as (near, far):
                for part, (source, target) in enumerate(
                    zip(sources, targets, strict=True)
                ):
                    source.fill(1)
                    far.receive(1, part, target)
                    near.send(1, part, source)
                await after_turns(turns)
                await quiesce(near)
                for source in sources:
                    source.fill(_OVERWRITE)
                await _expect_to_go_on(near, far)
                await far.quiesce(1)
                for target in targets:
                    expect(int(target.max()) <= 1, f"the overwrite arrived ({turns})")


async def a_quiet_target_is_not_written_to(make_pair: MakeTransportPair) -> None:
    """To the sender everything has left: what is late is dropped."""
    sources = [noise(LARGE, seed) for seed in (1, 2)]
    digests = [digest_of(source) for source in sources]
    targets = [memory(LARGE) for _ in sources]
    for quiesce in _WAYS:
        for turns in _TURNS:
            async with open_sides(make_pair) as (near, far):
                for part, target in enumerate(targets):
                    far.receive(1, part, target)
                    near.send(1, part, sources[part])
                await after_turns(turns)
                await quiesce(far)
                for target in targets:
                    target.fill(_OVERWRITE)
                found = [await leaving for leaving in near.landings]
                expect(found == digests, "the digests of what was sent")
                await _expect_to_go_on(near, far)
                for target in targets:
                    is_left = bool((target == _OVERWRITE).all())
                    expect(is_left, f"written to when it was quiet ({turns})")


async def both_sides_may_stop_at_once(make_pair: MakeTransportPair) -> None:
    """And again, and a transfer that moves beside it does not notice."""
    target = memory(LARGE)
    for turns in _TURNS:
        async with open_sides(make_pair) as (near, far):
            for part in range(2):
                far.receive(1, part, target if part else memory(LARGE))
                near.send(1, part, noise(LARGE))
            beside = far.receive(3, 0, memory(2**20))
            near.send(3, 0, noise(2**20))
            await after_turns(turns)
            for side in (near, far, near):
                side.stop(1)
            await asyncio.gather(near.quiesce(1), far.quiesce(1), far.quiesce(1))
            expect(await beside == digest_of(noise(2**20)), "what moved beside it")
            await _expect_to_go_on(near, far)


async def what_comes_for_a_stopped_transfer_is_dropped(
    make_pair: MakeTransportPair,
) -> None:
    """Also where nothing of it had come, and the peer hears of the stop later."""
    for nbytes in (0, 5, 2**17, LARGE):
        async with open_sides(make_pair) as (near, far):
            target = memory(nbytes)
            far.receive(1, 0, target)
            far.stop(1)
            leaving = near.send(1, 0, noise(nbytes))
            expect(await leaving == digest_of(noise(nbytes)), "it has left")
            await _expect_to_go_on(near, far)
            expect(not target.any(), "a stopped target was written to")


async def what_was_announced_and_is_not_received_is_dropped(
    make_pair: MakeTransportPair,
) -> None:
    """It was stopped before it was received: no lie of the peer."""
    async with open_sides(make_pair) as (near, far):
        await _expect_to_go_on(near, far)  # nothing is sent before a first grant
        far.transport.announce(18)
        for transfer, nbytes in ((18, 5), (17, LARGE), (18, 2**17)):
            leaving = near.send(transfer, nbytes % 7, noise(nbytes))
            expect(await leaving == digest_of(noise(nbytes)), "it has left")
        await _expect_to_go_on(near, far, 7)


async def quiet_is_at_once_where_nothing_moves(make_pair: MakeTransportPair) -> None:
    """A transfer that nobody knows, one that has landed, one that waits."""
    async with open_sides(make_pair) as (near, far):
        landing = far.receive(1, 0, memory(2**17))
        near.send(1, 0, noise(2**17))
        await landing
        far.receive(3, 0, memory(2**17))
        async with asyncio.timeout(0.5):
            for transfer in (99, 1, 3, 3):
                await near.quiesce(transfer)
                await far.quiesce(transfer)
        await _expect_to_go_on(near, far)


async def a_callback_may_stop_its_own_transfer(make_pair: MakeTransportPair) -> None:
    """In the middle of being told: nobody else of that transfer is."""
    async with open_sides(make_pair) as (near, far):
        for part in range(40):
            far.receive(1, part, memory(part * 9), told=lambda _: far.stop(1))
        for part in range(40):
            near.send(1, part, noise(part * 9))
        await near.landings[-1]
        far.transport.announce(3)
        for part in range(40):
            near.send(3, part, noise(part * 9), told=lambda _: near.stop(3))
        for part in range(40):
            far.receive(4, part, memory(part * 9))
        for part in range(40):
            near.send(4, part, noise(part * 9), told=lambda _: far.stop(4))
        await _expect_to_go_on(near, far)
        for transfer, side in ((1, far), (3, near)):
            told = [one.is_told for one in side.landings if one.transfer == transfer]
            expect(sum(told) == 1, f"{sum(told)} parts told of {transfer}")


async def memory_is_let_go(make_pair: MakeTransportPair) -> None:
    """Whoever gave it can resize it: when it was told, or when it is quiet."""
    for nbytes in (5, LARGE):
        async with open_sides(make_pair) as (near, far):
            held = [bytearray(nbytes) for _ in range(4)]
            landing = far.receive(1, 0, held[0])
            near.send(1, 0, held[1])
            await landing
            await _expect_let_go(held[:2])
            far.receive(3, 0, held[2])
            near.send(3, 0, held[3])
            await after_turns(5)
            await asyncio.gather(near.quiesce(3), far.quiesce(3))
            await _expect_let_go(held[2:])


async def _expect_let_go(held: list[bytearray]) -> None:
    def is_let_go() -> bool:
        with contextlib.suppress(BufferError):
            for buffer in held:
                buffer.clear()
            return True
        return False

    try:
        await until(is_let_go, timeout_s=1)
    except TimeoutError:
        raise AssertionError("memory that is quiet is still held") from None


async def _expect_to_go_on(near: Side, far: Side, transfer: int = 5) -> None:
    """Nobody is lost, and the next transfer moves on every lane."""
    sources = [noise(2**17, seed) for seed in range(6)]
    targets = [memory(2**17) for _ in sources]
    landings = [far.receive(transfer, *target) for target in enumerate(targets)]
    for part, source in enumerate(sources):
        near.send(transfer, part, source)
    for landing, source, target in zip(landings, sources, targets, strict=True):
        expect(await landing == digest_of(source), "the digest of the next transfer")
        expect(target.tobytes() == source, "the bytes of the next transfer")
    expect(not (near.lost or far.lost), f"lost: {near.lost} {far.lost}")


STOPPING_CHECKS: Final[tuple[TransportCheck, ...]] = (
    a_quiet_source_may_be_overwritten,
    a_quiet_target_is_not_written_to,
    both_sides_may_stop_at_once,
    what_comes_for_a_stopped_transfer_is_dropped,
    what_was_announced_and_is_not_received_is_dropped,
    quiet_is_at_once_where_nothing_moves,
    a_callback_may_stop_its_own_transfer,
    memory_is_let_go,
)
