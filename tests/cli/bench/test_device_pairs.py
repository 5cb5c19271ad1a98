from __future__ import annotations

import pytest

import asynckv
from asynckv.cli.bench.device import DevicePair
from asynckv.cli.bench.device_server import TOKENS, content_of
from asynckv.cli.bench.rig import WrongBytes


async def test_a_wrong_byte_ends_the_measurement() -> None:
    async with (
        asynckv.LookupBuffer("1MiB") as buffer,
        asynckv.serve("mem://wrong-byte", lookup=buffer) as server,
        asynckv.connect(server.url) as peer,
    ):
        for content in (content_of(4), content_of(4).flip(0)):
            await buffer.insert(TOKENS, None, content, None, None)
        with pytest.raises(WrongBytes, match="another process"):
            await DevicePair(peer, {"map": peer}, 4, 1).check()


async def test_parts_are_counted() -> None:
    async with (
        asynckv.LookupBuffer("1MiB") as buffer,
        asynckv.serve("mem://parts", lookup=buffer) as server,
        asynckv.connect(server.url) as peer,
    ):
        for _ in range(3):
            await buffer.insert(TOKENS, None, content_of(4), None, None)
        assert await DevicePair(peer, {"map": peer}, 6, 3).parts_s("map") > 0
        assert await peer.lookup.peek(TOKENS) == 0
