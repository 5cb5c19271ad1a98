from __future__ import annotations

import asyncio

import pytest

from asynckv.errors import RemoteProtocolError
from asynckv.pipes.inbound import Reports
from asynckv.protocol.frames import Flushed, Frame, Read

BOUND = 1000


@pytest.fixture
def said() -> list[Frame]:
    return []


@pytest.fixture
async def reports(said: list[Frame]) -> Reports:
    return Reports(lambda frame, body: said.append(frame), BOUND)


async def test_all_of_one_tick_is_said_together(
    reports: Reports, said: list[Frame]
) -> None:
    reports.owe(BOUND, 2)
    reports.owe(0, 1)
    reports.verified(2)
    assert not said
    await asyncio.sleep(0)
    assert said == [Flushed(2), Read(BOUND, 3)]


async def test_what_was_not_told_to_have_room_may_not_come(reports: Reports) -> None:
    reports.owe(BOUND, 1)
    with pytest.raises(RemoteProtocolError, match="no room"):
        reports.charge(1)
    reports.tell()
    reports.charge(1)
    with pytest.raises(RemoteProtocolError, match="no room"):
        reports.charge(1)


async def test_what_is_above_the_bound_comes_when_all_of_it_is_free(
    reports: Reports,
) -> None:
    reports.owe(BOUND, 3)
    reports.tell()
    reports.charge(2 * BOUND)
    with pytest.raises(RemoteProtocolError, match="no room"):
        reports.charge(1)
    reports.owe(2 * BOUND, 1)
    reports.tell()
    reports.charge(BOUND)


async def test_after_the_end_nothing_is_said_by_itself(
    reports: Reports, said: list[Frame]
) -> None:
    reports.owe(BOUND, 1)
    reports.end()
    reports.verified(1)
    await asyncio.sleep(0)
    assert not said
    reports.tell()
    assert said == [Flushed(1), Read(BOUND, 1)]
