"""A few pages over HTTP: what is answered, and what is not waited for."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.parse
from collections.abc import AsyncIterator

import pytest

from asynckv.cli.serve.http import Page, serve_http
from asynckv.errors import ConfigError
from asynckv.testing.blocked import until
from harness.serve_processes import http_get

MAX_CONNECTIONS = 32


async def hello() -> Page:
    return Page(b"hello")


async def never() -> Page:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


@pytest.fixture
async def url() -> AsyncIterator[str]:
    pages = {"/hello": hello, "/never": never}
    async with serve_http("127.0.0.1:0", pages) as url:
        yield url


async def connected(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urllib.parse.urlsplit(url)
    return await asyncio.open_connection(parts.hostname, parts.port)


async def answer_to(url: str, request: bytes) -> bytes:
    """Return all that is answered until the other side hangs up."""
    reader, writer = await connected(url)
    try:
        writer.write(request)
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


@pytest.mark.both_loops
async def test_a_page_is_answered_and_the_connection_closed(url: str) -> None:
    answer = await answer_to(url, b"GET /hello?x=1 HTTP/1.1\r\nHost: x\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n") and body == b"hello"
    assert b"Content-Length: 5\r\n" in head and b"Connection: close" in head


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"HEAD /hello HTTP/1.0", 200),
        (b"GET /nothing HTTP/1.1", 404),
        (b"POST /hello HTTP/1.1", 405),
        (b"GET /hello", 400),
        (b"GET /hello SMTP/1.1", 400),
        (b"\x16\x03\x01", 400),
    ],
)
async def test_what_is_no_page_has_a_status(
    url: str, request_line: bytes, status: int
) -> None:
    answer = await answer_to(url, request_line + b"\r\n\r\n")
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert not answer.endswith(b"hello")


async def test_a_request_without_an_end_is_refused(url: str) -> None:
    answer = await answer_to(url, b"GET /hello HTTP/1.1\r\nX: " + b"x" * 10_000)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")


@pytest.mark.both_loops
async def test_the_oldest_of_too_many_connections_is_hung_up_on(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asynckv.cli.serve.http._ANSWER_S", 60.0)
    silent = [await connected(url) for _ in range(MAX_CONNECTIONS)]
    assert (await http_get(f"{url}/hello"))[0] == 200
    (oldest, _), (reader, writer), *_ = silent
    with contextlib.suppress(ConnectionResetError):
        assert await oldest.read() == b""
    writer.write(b"GET /hello HTTP/1.1\r\n\r\n")
    assert (await reader.read()).endswith(b"hello")
    for _, writer in silent:
        writer.close()


async def test_who_takes_too_long_is_hung_up_on(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asynckv.cli.serve.http._ANSWER_S", 0.05)
    assert await answer_to(url, b"GET /hello") == b""
    assert await answer_to(url, b"GET /never HTTP/1.1\r\n\r\n") == b""
    assert (await http_get(f"{url}/hello"))[0] == 200


async def test_leaving_ends_what_is_under_way() -> None:
    async with serve_http("127.0.0.1:0", {"/never": never}) as url:
        asking = asyncio.create_task(answer_to(url, b"GET /never HTTP/1.1\r\n\r\n"))
        asked = asyncio.all_tasks
        await until(lambda: any("HTTP request" in t.get_name() for t in asked()))
    assert await asking == b""


async def test_an_address_is_a_host_and_a_port() -> None:
    async with serve_http("[::1]:0", {"/hello": hello}) as url:
        assert url.startswith("http://[::1]:")
    for wrong in (
        "9464",
        ":9464",
        "127.0.0.1",
        "127.0.0.1:x",
        "http://127.0.0.1:1",
        "a..b:1",
    ):
        with pytest.raises(ConfigError, match="no address"):
            await serve_http(wrong, {}).__aenter__()


async def test_an_address_in_use_is_said() -> None:
    async with serve_http("127.0.0.1:0", {}) as url:
        taken = url.removeprefix("http://")
        with pytest.raises(ConfigError, match=f"cannot listen at {taken}"):
            await serve_http(taken, {}).__aenter__()
