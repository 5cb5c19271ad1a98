from __future__ import annotations

import asyncio

from asynckv.testing import until_blocked
from asynckv.transports.parts import Part, PendingParts


def _part(transfer: int, told: list[int] | None = None) -> Part:
    def done(digest: bytes, error: BaseException | None) -> None:
        if told is not None:
            told.append(transfer)

    return Part(transfer, 0, memoryview(b"x"), done, b"")


async def test_a_part_is_pending_until_somebody_was_told() -> None:
    told = list[int]()
    pending: PendingParts[Part] = PendingParts(asyncio.get_running_loop())
    pending.add(part := _part(1, told))
    assert pending
    pending.complete(part)
    assert told == [1]
    assert not pending


async def test_of_a_stopped_transfer_nobody_is_told() -> None:
    told = list[int]()
    pending: PendingParts[Part] = PendingParts(asyncio.get_running_loop())
    pending.add(part := _part(1, told))
    pending.add(_part(2, told))
    pending.stop(1)
    pending.complete(part)
    assert told == []
    assert [part.transfer for part in pending.take_all()] == [2]
    assert not pending


async def test_waiting_ends_with_the_last_part() -> None:
    pending: PendingParts[Part] = PendingParts(asyncio.get_running_loop())
    await pending.wait_until_none(60)
    parts = [_part(1), _part(1), _part(2)]
    for part in parts:
        pending.add(part)
    waits = [asyncio.create_task(pending.wait_until_none(60)) for _ in range(2)]
    pending.complete(parts[0])
    pending.complete(parts[1])
    await until_blocked(*waits)
    assert not any(wait.done() for wait in waits)
    pending.stop(2)
    async with asyncio.timeout(5):
        await asyncio.gather(*waits)


async def test_waiting_is_bounded() -> None:
    pending: PendingParts[Part] = PendingParts(asyncio.get_running_loop())
    pending.add(_part(1))
    await pending.wait_until_none(0.01)
    assert pending
