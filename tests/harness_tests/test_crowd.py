from __future__ import annotations

import asyncio

import torch

from asynckv.testing.blocked import until
from asynckv.testing.pairs import open_kv_pair
from harness.crowd import GREETED, STRANGE, Attendance, besiege


async def test_a_crowd_comes_in_every_way_and_goes_when_it_is_cancelled() -> None:
    async with open_kv_pair("tcp") as pair:
        there = Attendance()
        siege = asyncio.create_task(besiege(pair.server.url, 16, there))
        await until(lambda: len(pair.server.peers) > 3 and there.now > 3)
        await pair.peer.lookup.insert([1], None, torch.ones(1), None, None)
        assert (await pair.peer.lookup.drop_select([1])).nbytes == 12
        siege.cancel()
        await asyncio.wait({siege})
        assert there.now == 0
        await until(lambda: len(pair.server.peers) == 1)


def test_there_is_a_way_for_each() -> None:
    ways = [*GREETED, *STRANGE]
    assert len({way.__name__ for way in ways}) == len(ways) == 15
