from __future__ import annotations

import asyncio

import pytest

from asynckv.abc import PayloadTransport
from asynckv.errors import PeerLost
from asynckv.testing import until, until_blocked
from asynckv.testing.transport_pairs import (
    TRANSPORT_KINDS,
    TransportKind,
    open_transport_pair,
)


@pytest.mark.parametrize("kind", TRANSPORT_KINDS)
async def test_the_side_that_is_left_hears_of_it(kind: TransportKind) -> None:
    lost: list[list[Exception]] = [[], []]
    opening = open_transport_pair(kind, lost[0].append, lost[1].append)
    async with opening as (near, far):
        target = bytearray(4)
        far.receive(1, 0, memoryview(target), lambda *_: None)
        near.abort()
        await until(lambda: bool(lost[1]))
    assert lost[0] == []
    assert [type(error) for error in lost[1]] == [PeerLost]


async def test_both_ends_close_though_the_wait_for_the_first_is_cancelled() -> None:
    opened: list[PayloadTransport] = []
    told: list[BaseException | None] = []

    async def use() -> None:
        opening = open_transport_pair("unix", lambda _: None, lambda _: None)
        async with opening as (near, far):
            opened.append(far)
            # Nobody takes it, so the end of the near side waits for it.
            near.send(1, 0, memoryview(bytes(2**24)), lambda *_: None)

    task = asyncio.create_task(use())
    await until(lambda: bool(opened))
    await until_blocked(task)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    opened[0].receive(1, 0, memoryview(bytearray(4)), lambda _, exc: told.append(exc))
    await until(lambda: bool(told))
    assert [type(error) for error in told] == [PeerLost]
