from __future__ import annotations

import asyncio

import pytest

from asynckv.errors import RemoteProtocolError
from asynckv.pipes.inbound import Reports
from asynckv.pipes.parcels import MAX_TENSORS
from asynckv.protocol.frames import Flushed, Frame, Read
from asynckv.testing import until

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


async def test_little_room_is_said_a_little_later_and_all_of_it_then(
    reports: Reports, said: list[Frame]
) -> None:
    reports.owe(BOUND // 4 - 2, 1)
    await asyncio.sleep(0)
    reports.owe(1, 1)
    reports.tell()
    assert not said
    await until(lambda: bool(said))
    assert said == [Read(BOUND // 4 - 1, 2)]


@pytest.mark.parametrize(
    ("nbytes", "tensors"), [(BOUND // 4, 1), (0, MAX_TENSORS // 4)]
)
async def test_room_is_said_at_once_with_a_quarter_of_the_bound(
    reports: Reports, said: list[Frame], nbytes: int, tensors: int
) -> None:
    reports.owe(nbytes, tensors)
    await asyncio.sleep(0)
    assert said == [Read(nbytes, tensors)]


async def test_what_somebody_else_says_is_not_said_again(
    reports: Reports, said: list[Frame]
) -> None:
    reports.verified(2)
    assert (reports.take_verified(), reports.take_verified()) == (2, 0)
    await asyncio.sleep(0)
    assert not said
    reports.verified(1)
    await asyncio.sleep(0)
    assert said == [Flushed(3)]


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
