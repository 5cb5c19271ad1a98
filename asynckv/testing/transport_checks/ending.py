"""How a transport ends: everybody is told once, soon, and when memory is quiet.

A transfer that is stopped, on either side and at any moment, leaves memory alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
from collections.abc import Awaitable, Callable
from typing import Final

import anyio

from asynckv.errors import RemoteProtocolError
from asynckv.protocol.wire import digest_of
from asynckv.testing.blocked import until
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.testing.expectations import CANCEL_MODES, expect, expect_error
from asynckv.testing.transport_checks.sides import (
    CHUNK,
    ENDS_WITHIN_S,
    LARGE,
    Bytes,
    LandedCallback,
    MakeTransportPair,
    Side,
    TransportCheck,
    after_turns,
    all_told,
    memory,
    noise,
    open_sides,
)

__all__ = (
    "ENDING_CHECKS",
    "STOPPING_CHECKS",
    "a_callback_may_abort",
    "a_callback_may_stop_its_own_transfer",
    "a_cancelled_close_has_closed",
    "a_part_larger_than_its_memory_is_refused",
    "a_quiet_source_may_be_overwritten",
    "a_quiet_target_is_not_written_to",
    "a_transfer_never_announced_is_a_protocol_error",
    "an_abort_ends_everything_once_and_soon",
    "both_sides_may_stop_at_once",
    "closing_lets_queued_parts_leave",
    "closing_twice_is_closing_once",
    "memory_is_let_go",
    "memory_is_quiet_when_an_error_is_told",
    "nothing_is_left_behind",
    "quiet_is_at_once_where_nothing_moves",
    "the_peers_end_is_no_loss_while_nothing_moves",
    "what_comes_after_the_end_is_told_so",
    "what_comes_for_a_stopped_transfer_is_dropped",
    "what_was_announced_and_is_not_received_is_dropped",
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

    async def check(k: int, mode: CancelMode, outcome: Outcome[None]) -> None:
        if k:  # it has begun
            await all_told(sides[0])
        await stack.aclose()

    try:
        await sweep_cancellation(
            lambda: _close(sides[0]), check, before=before, modes=CANCEL_MODES
        )
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


def _overwrite(array: Bytes) -> LandedCallback:
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
