from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from asynckv.cli.bench import echo
from asynckv.cli.bench.echo import EchoConnection, EchoServer, in_turns
from asynckv.testing import until_blocked

pytestmark = pytest.mark.both_loops

TOKEN = bytes(range(32))


@contextlib.asynccontextmanager
async def connected(token: bytes = TOKEN) -> AsyncIterator[EchoConnection]:
    async with EchoServer("127.0.0.1", TOKEN) as port:
        connection = await EchoConnection.open("127.0.0.1", port, token)
        try:
            yield connection
        finally:
            connection.close()


@pytest.mark.parametrize("nbytes", [0, 64, 40_000])
async def test_what_was_sent_comes_back(nbytes: int) -> None:
    async with connected() as connection:
        for seed in range(3):
            body = bytes([seed]) * nbytes
            assert await connection.ping(body) == body


async def test_who_has_another_token_is_hung_up_on() -> None:
    async with connected(bytes(32)) as connection:
        with pytest.raises(ConnectionError):
            await connection.ping(b"")


async def test_a_token_of_another_length_is_no_token() -> None:
    with pytest.raises(ValueError, match="3 bytes"):
        await EchoConnection.open("127.0.0.1", 1, b"abc")


async def test_who_sends_too_much_is_hung_up_on() -> None:
    async with connected() as connection:
        with pytest.raises(ConnectionError):
            await connection.ping(bytes(2**17))


async def test_who_says_what_no_bench_says_is_hung_up_on() -> None:
    async with connected() as connection:
        connection.send(b"no message")
        with pytest.raises(ConnectionError):
            await connection.ping(b"")


async def test_who_brings_no_token_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(echo, "_TOKEN_TIMEOUT_S", 0.05)
    async with EchoServer("127.0.0.1", TOKEN) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()


async def test_a_server_that_closes_ends_who_waits() -> None:
    async with contextlib.AsyncExitStack() as stack:
        server = EchoServer("127.0.0.1", TOKEN)
        port = await stack.enter_async_context(server)
        connection = await EchoConnection.open("127.0.0.1", port, TOKEN)
        await connection.ping(b"")
        for each in server.connections:
            each.received = lambda message: None  # type: ignore[method-assign]
        waiting = asyncio.create_task(connection.ping(b""))
        await until_blocked(waiting)
        await stack.aclose()
        with pytest.raises(ConnectionError):
            await waiting


async def test_calls_take_turns_and_the_baseline_is_first_and_last() -> None:
    order: list[str] = []

    async def ours() -> None:
        order.append("o")

    async def bare() -> None:
        order.append("b")

    turns = await in_turns(25, ours, bare)
    assert "".join(order) == "b" * 10 + ("o" * 10 + "b" * 10) * 2 + "o" * 5 + "b" * 10
    assert [len(one) for one in (turns.ours, turns.before, turns.after)] == [25, 20, 20]
