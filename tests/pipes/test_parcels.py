from __future__ import annotations

import asyncio

from asynckv.pipes.parcels import Parcel
from asynckv.types import TensorSpec


def test_none_has_no_bytes() -> None:
    assert Parcel(None).nbytes == 0
    assert Parcel(TensorSpec((2, 3), "float32")).nbytes == 24


async def test_who_was_cancelled_is_not_woken() -> None:
    parcel, loop = Parcel(None), asyncio.get_running_loop()
    parcel.wake()
    parcel.turn = loop.create_future()
    parcel.watchers = [loop.create_future(), loop.create_future()]
    parcel.turn.cancel()
    parcel.watchers[0].cancel()
    parcel.wake()
    parcel.settle(is_verified=True)
    parcel.settle(is_verified=False)
    assert parcel.watchers[1].result() is True
