from __future__ import annotations

import asyncio

from asynckv.pipes.parcels import MAX_TENSORS, Credit, Parcel, SendRoom
from asynckv.testing import until_blocked
from asynckv.types import TensorSpec


def _parcel(nbytes: int) -> Parcel:
    return Parcel(TensorSpec((nbytes,), "uint8"))


async def test_room_is_given_in_the_order_of_the_calls() -> None:
    admitted: list[Parcel] = []
    room = SendRoom(10, admitted.append)
    parcels = [_parcel(nbytes) for nbytes in (6, 6, 1)]
    tasks = [asyncio.create_task(room.wait_for(parcel)) for parcel in parcels]
    await until_blocked(*tasks)
    assert (admitted, len(room), room.waits) == (parcels[:1], 2, 2)
    room.release(parcels[0])
    room.advance()
    await asyncio.gather(*tasks)
    assert (admitted, room.used_bytes, room.used_tensors) == (parcels, 7, 2)


async def test_what_is_above_the_bound_goes_alone() -> None:
    room = SendRoom(10, lambda parcel: None)
    await room.wait_for(_parcel(11))
    small = asyncio.create_task(room.wait_for(_parcel(1)))
    await until_blocked(small)
    room.release(_parcel(11))
    room.advance()
    await small


async def test_who_leaves_the_line_is_not_admitted() -> None:
    admitted: list[Parcel] = []
    room = SendRoom(10, admitted.append)
    parcels = [_parcel(10) for _ in range(3)]
    tasks = [asyncio.create_task(room.wait_for(parcel)) for parcel in parcels]
    await until_blocked(*tasks)
    tasks[1].cancel()
    room.quit(parcels[1])
    room.quit(parcels[1])
    room.release(parcels[0])
    room.advance()
    await tasks[2]
    assert admitted == [parcels[0], parcels[2]]


async def test_a_closed_room_wakes_all_and_admits_nobody() -> None:
    room = SendRoom(10, lambda parcel: None)
    await room.wait_for(first := _parcel(10))
    late = _parcel(1)
    waiting = asyncio.create_task(room.wait_for(late))
    await until_blocked(waiting)
    room.close()
    await waiting
    room.release(first)
    await room.wait_for(late)
    assert not late.has_room


def test_the_first_word_of_the_peer_is_its_bound() -> None:
    credit = Credit()
    assert not credit.allows(0)
    credit.add(10, MAX_TENSORS)
    assert credit.allows(11)
    credit.take(1)
    assert credit.allows(9)
    assert not credit.allows(10)
    credit.add(1, 1)
    assert credit.allows(11)


def test_without_tensors_to_spare_nothing_goes() -> None:
    credit = Credit()
    credit.add(10, 1)
    credit.take(0)
    assert not credit.allows(0)
