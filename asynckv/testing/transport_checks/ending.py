"""How a transport ends: everybody is told once, soon, and when memory is quiet."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
from typing import Final

from asynckv.errors import RemoteProtocolError
from asynckv.protocol.digests import digest_of
from asynckv.testing.blocked import until
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.testing.expectations import CANCEL_MODES, expect, expect_error
from asynckv.testing.transport_checks.sides import (
    CHUNK,
    ENDS_WITHIN_S,
    LARGE,
    Bytes,
    MakeTransportPair,
    Side,
    ToldCallback,
    TransportCheck,
    after_turns,
    all_told,
    memory,
    noise,
    open_sides,
)

__all__ = (
    "ENDING_CHECKS",
    "a_callback_may_abort",
    "a_cancelled_close_has_closed",
    "a_part_larger_than_its_memory_is_refused",
    "a_transfer_never_announced_is_a_protocol_error",
    "an_abort_ends_everything_once_and_soon",
    "closing_lets_queued_parts_leave",
    "closing_twice_is_closing_once",
    "memory_is_quiet_when_an_error_is_told",
    "nothing_is_left_behind",
    "the_peers_end_is_no_loss_while_nothing_moves",
    "what_comes_after_the_end_is_told_so",
)

_TURNS: Final = (0, 1, 5, 30, 300)
_OVERWRITE: Final = 9


async def a_transfer_never_announced_is_a_protocol_error(
    make_pair: MakeTransportPair,
) -> None:
    """For the receiver, which ends by it; whoever waits there is told."""
    async with open_sides(make_pair) as (near, far):
        far.transport.announce(6)
        waiting = far.receive(5, 0, memory(10))
        near.send(7, 0, noise(10))
        await expect_error(RemoteProtocolError, waiting)
        await all_told(far)
        lost = [type(error) for error in far.lost]
        expect(lost == [RemoteProtocolError], f"lost: {far.lost}")
        near.transport.abort()


async def a_part_larger_than_its_memory_is_refused(
    make_pair: MakeTransportPair,
) -> None:
    """Or its end is dropped: not one byte lands beside the memory that was given."""
    for nbytes in (10, CHUNK):
        async with open_sides(make_pair) as (near, far):
            around = memory(nbytes + 64, 7)
            waiting = far.receive(1, 0, around[:nbytes])
            near.send(1, 0, noise(nbytes + 1))
            with contextlib.suppress(RemoteProtocolError):
                expect(await waiting == digest_of(noise(nbytes + 1)[:nbytes]), "digest")
            await after_turns(30)
            expect(bool((around[nbytes:] == 7).all()), "written beyond its memory")
            near.transport.abort()
            far.transport.abort()


async def an_abort_ends_everything_once_and_soon(make_pair: MakeTransportPair) -> None:
    """Whatever moves, waits or was queued, in both directions."""
    for turns in _TURNS:
        async with open_sides(make_pair) as (near, far):
            _begin_everything(near, far)
            await after_turns(turns)
            for side in (near, far):
                side.transport.abort()
                side.transport.abort()
                await all_told(side)
                expect(not side.lost or side is far, f"lost by its own: {side.lost}")
                expect(side.landings[-1].error is not None, "it can never have moved")


async def memory_is_quiet_when_an_error_is_told(make_pair: MakeTransportPair) -> None:
    """The caller overwrites it in that moment, and nobody notices."""
    sources, targets = ([memory(2 * CHUNK) for _ in range(3)] for _ in "ab")
    for turns in (*range(0, 20, 3), 60, 200):
        for is_senders in (False, True):
            async with open_sides(make_pair) as (near, far):
                for part, source in enumerate(sources):
                    source.fill(1)
                    target = targets[part]
                    far.receive(1, part, target, told=_overwrite(target))
                    near.send(1, part, source, told=_overwrite(source))
                await after_turns(turns)
                for side in (near, far) if is_senders else (far, near):
                    side.transport.abort()
                    await all_told(side)
                await after_turns(20)
                for landing, target in zip(far.landings, targets, strict=True):
                    value = 1 if landing.error is None else _OVERWRITE
                    is_left = bool((target == value).all())
                    expect(is_left, f"touched after it was told {landing.error}")


async def a_callback_may_abort(make_pair: MakeTransportPair) -> None:
    """In the middle of being told: all others are told of the end."""
    async with open_sides(make_pair) as (near, far):
        for part in range(8):
            far.receive(
                1, part, memory(2**16 + part), told=lambda _: far.transport.abort()
            )
        for part in range(8):
            near.send(1, part, noise(2**16 + part))
        await all_told(far)
        expect(not far.lost, f"lost by its own: {far.lost}")
        near.transport.abort()
        await all_told(near)


async def what_comes_after_the_end_is_told_so(make_pair: MakeTransportPair) -> None:
    """Nothing is forgotten because it came too late, however few its bytes."""
    for end in (_abort, _close):
        async with open_sides(make_pair) as (near, _):
            await end(near)
            for transfer, nbytes in enumerate((0, 10, CHUNK)):
                near.receive(2 * transfer, 0, memory(nbytes))
                near.send(2 * transfer + 1, 0, noise(nbytes))
            await all_told(near)
            for landing in near.landings:
                expect(landing.error is not None, "it moved after the end")
            for transfer in range(6):
                await near.quiesce(transfer)
            expect(not near.lost, f"lost by its own: {near.lost}")


async def closing_lets_queued_parts_leave(make_pair: MakeTransportPair) -> None:
    """And the peer receives them, though nobody answers any more."""
    async with open_sides(make_pair) as (near, far):
        for part in range(4):
            far.receive(1, part, memory(CHUNK))
            near.send(1, part, noise(CHUNK, part))
        await near.transport.aclose()
        for part in range(4):
            digest = digest_of(noise(CHUNK, part))
            expect(await near.landings[part] == digest, "it has left")
            expect(await far.landings[part] == digest, "it has landed")
        expect(not (near.lost or far.lost), f"lost: {near.lost} {far.lost}")


async def closing_twice_is_closing_once(make_pair: MakeTransportPair) -> None:
    """At once, after an abort, and beside what will never come: within 2 s."""
    async with open_sides(make_pair) as (near, far):
        waiting = near.receive(2, 0, memory(10))
        async with asyncio.timeout(2 * ENDS_WITHIN_S):
            await asyncio.gather(*(near.transport.aclose() for _ in range(3)))
            await near.transport.aclose()
        expect(waiting.error is not None, "a part that will never come is told so")
        near.transport.abort()
        far.transport.abort()
        await far.transport.aclose()
        expect(not near.lost, f"lost by its own: {near.lost}")


async def a_cancelled_close_has_closed(make_pair: MakeTransportPair) -> None:
    """At whatever moment: everybody is told, and soon."""
    stack = contextlib.AsyncExitStack()
    sides: list[Side] = []

    async def before() -> None:
        sides[:] = await stack.enter_async_context(open_sides(make_pair))
        _begin_everything(sides[0], sides[1], CHUNK)

    async def close() -> None:
        await sides[0].transport.aclose()

    async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
        if k:  # it has begun
            await all_told(sides[0])
        await stack.aclose()

    try:
        await sweep_cancellation(close, check, before=before, modes=CANCEL_MODES)
    finally:
        await stack.aclose()


async def the_peers_end_is_no_loss_while_nothing_moves(
    make_pair: MakeTransportPair,
) -> None:
    """It says goodbye elsewhere; here nothing is missing."""
    for end in (_abort, _close):
        async with open_sides(make_pair) as (near, far):
            landing = far.receive(1, 0, memory(10))
            near.send(1, 0, noise(10))
            await landing
            await end(near)
            await after_turns(30)
            expect(not far.lost, f"lost: {far.lost}")
            await _close(far)
            expect(not far.lost, f"lost by its own: {far.lost}")


async def nothing_is_left_behind(make_pair: MakeTransportPair) -> None:
    """No thread, no descriptor, no task, once it is closed or aborted."""
    for end in (_abort, _close):
        before = await _belongings()
        async with open_sides(make_pair) as (near, far):
            _begin_everything(near, far)
            await after_turns(30)
            await end(near)
            await end(far)
        for _ in range(200):
            if not (left := await _belongings() - before):
                break
            await asyncio.sleep(0.01)
        expect(not left, f"left behind: {', '.join(sorted(left))}")


def _begin_everything(near: Side, far: Side, nbytes: int = LARGE) -> None:
    """Parts that move, parts that are queued, and last parts that never come."""
    for part in range(3):
        far.receive(1, part, memory(nbytes))
        near.receive(2, part, memory(nbytes))
        near.send(1, part, noise(nbytes))
        far.send(2, part, noise(nbytes))
    far.receive(3, 0, memory(nbytes))
    near.receive(4, 0, memory(nbytes))


def _overwrite(array: Bytes) -> ToldCallback:
    def told(error: BaseException | None) -> None:
        if error is not None:
            array.fill(_OVERWRITE)

    return told


async def _abort(side: Side) -> None:
    side.transport.abort()


async def _close(side: Side) -> None:
    await side.transport.aclose()


async def _belongings() -> set[str]:
    """Threads, tasks and, where the system tells, descriptors."""
    gc.collect()
    found = {f"thread {thread.name}" for thread in threading.enumerate()}
    found |= {f"task {task.get_name()}" for task in asyncio.all_tasks()}
    # Reading a folder blocks, so it is not done on the loop.
    looking = threading.Thread(target=_add_descriptors, args=[found])
    looking.start()
    await until(lambda: not looking.is_alive())
    return found


def _add_descriptors(found: set[str]) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # that of this listing
                found.add(f"descriptor {name} {os.readlink(f'/proc/self/fd/{name}')}")


ENDING_CHECKS: Final[tuple[TransportCheck, ...]] = (
    a_transfer_never_announced_is_a_protocol_error,
    a_part_larger_than_its_memory_is_refused,
    an_abort_ends_everything_once_and_soon,
    memory_is_quiet_when_an_error_is_told,
    a_callback_may_abort,
    what_comes_after_the_end_is_told_so,
    closing_lets_queued_parts_leave,
    closing_twice_is_closing_once,
    a_cancelled_close_has_closed,
    the_peers_end_is_no_loss_while_nothing_moves,
    nothing_is_left_behind,
)
