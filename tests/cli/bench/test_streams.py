from __future__ import annotations

import asyncio

import pytest

from asynckv.cli.bench.baselines import StreamsConnection, StreamsServer

TOKEN = bytes(range(32))


@pytest.mark.parametrize("outstanding", [1, 3, 10])
async def test_every_request_is_answered_and_timed(outstanding: int) -> None:
    async with StreamsServer("127.0.0.1", TOKEN) as port:
        connection = await StreamsConnection.open("127.0.0.1", port, TOKEN)
        calls = await connection.exchange(5, outstanding, 1000)
        connection.close()
    assert len(calls) == 5


async def test_who_has_another_token_is_hung_up_on() -> None:
    async with StreamsServer("127.0.0.1", TOKEN) as port:
        connection = await StreamsConnection.open("127.0.0.1", port, bytes(32))
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await connection.exchange(1, 1, 10)
        connection.close()


async def test_who_asks_for_too_much_is_hung_up_on() -> None:
    async with StreamsServer("127.0.0.1", TOKEN) as port:
        connection = await StreamsConnection.open("127.0.0.1", port, TOKEN)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await connection.exchange(1, 1, 2**20 + 1)
        connection.close()
