"""A line does what it is told to, to who speaks by it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from harness.slow_lines import Line, line_to


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(2**16):
        writer.write(data)
    writer.close()


@pytest.fixture
async def line() -> AsyncIterator[Line]:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with line_to(server.sockets[0].getsockname()[1]) as line:
        yield line
    server.close()


async def said(line: Line, data: bytes, expected: int) -> bytes:
    """Say something by the line, and return what comes back of it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", line.port)
    writer.write(data)
    came = b""
    while len(came) < expected and (some := await reader.read(2**16)):
        came += some
    writer.close()
    await writer.wait_closed()
    return came


async def test_it_passes_on_what_comes_as_slowly_as_it_is_told_to(line: Line) -> None:
    assert await said(line, b"x" * 200_000, 200_000) == b"x" * 200_000
    line.rate, began = 1e6, time.monotonic()
    await said(line, b"x" * 100_000, 100_000)
    assert time.monotonic() - began >= 0.1


async def test_it_says_something_else_or_breaks_in_an_answer(line: Line) -> None:
    line.says = b"no"
    assert await said(line, b"hello", 2) == b"no"
    line.says, line.cuts_after = None, 3
    with contextlib.suppress(ConnectionError):  # if it is not read in time
        assert await said(line, b"hello", 5) == b"hel"
