"""A few pages over HTTP, for probes and scrapers, within fixed bounds of everything.

One GET or HEAD a connection, of at most 8 KiB, answered within 5 s or not at all; no
body is read. There are at most 32 connections: for the next one the oldest goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Final, TypeAlias

from asynckv.errors import ConfigError
from asynckv.security.names import is_host
from asynckv.waits.waiting import OwnTasks

__all__ = ("Page", "Pages", "host_and_port", "serve_http")

_MAX_REQUEST_NBYTES: Final = 8 * 1024
_MAX_CONNECTIONS: Final = 32
_ANSWER_S: Final = 5.0


@dataclasses.dataclass(frozen=True)
class Page:
    """What is answered."""

    body: bytes
    status: int = 200
    content_type: str = "text/plain; charset=utf-8"


Pages: TypeAlias = Mapping[str, Callable[[], Awaitable[Page]]]
"""By path."""


@contextlib.asynccontextmanager
async def serve_http(address: str, pages: Pages) -> AsyncIterator[str]:
    """Serve ``pages`` at ``"HOST:PORT"`` while it is entered; yields the URL.

    Leaving ends what is under way.

    :raises ConfigError: that is no address, or nobody can listen there
    """
    host, port = host_and_port(address)
    answering, oldest_first = OwnTasks(), dict[asyncio.Task[None], None]()

    def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def end(task: asyncio.Task[None]) -> None:
            oldest_first.pop(task, None)
            writer.transport.abort()

        if len(oldest_first) >= _MAX_CONNECTIONS:
            oldest = next(iter(oldest_first))
            del oldest_first[oldest]
            oldest.cancel()
        work = _answer(pages, reader, writer)
        task = answering.own(work, "asynckv: an HTTP request")
        oldest_first[task] = None
        task.add_done_callback(end)  # also of one that was cancelled before it began

    try:
        server = await asyncio.start_server(take, host, port, limit=_MAX_REQUEST_NBYTES)
    except OSError as exc:
        raise ConfigError(
            f"cannot listen at {address}: {exc.strerror or exc}",
            hint="another --http, or port 0 for a free one",
        ) from exc
    try:
        bound: tuple[str, int] = server.sockets[0].getsockname()[:2]
        shown = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        yield f"http://{shown}:{bound[1]}"
    finally:
        server.close()
        await answering.quiesce()


def host_and_port(address: str) -> tuple[str, int]:
    """Return what ``--http`` says.

    :raises ConfigError: that is no address
    """
    try:
        parts = urllib.parse.urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not is_host(host) or port is None or parts.netloc != address:
        raise ConfigError(
            f"--http is {address!r}, no address", hint="write 127.0.0.1:9464"
        )
    return host, port


async def _answer(
    pages: Pages, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        async with asyncio.timeout(_ANSWER_S):
            page, has_body = await _page_for(pages, reader)
            writer.write(_head(page))
            if has_body:
                writer.write(page.body)
            writer.close()
            await writer.wait_closed()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        pass  # whoever asked is gone, or too slow


async def _page_for(pages: Pages, reader: asyncio.StreamReader) -> tuple[Page, bool]:
    """Return what is asked for, and whether its body is wanted too."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        return _plain(http.HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE), True
    line = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
    if len(line) != 3 or not line[2].startswith("HTTP/1."):
        return _plain(http.HTTPStatus.BAD_REQUEST), True
    method, target, _ = line
    if method not in ("GET", "HEAD"):
        return _plain(http.HTTPStatus.METHOD_NOT_ALLOWED), True
    make = pages.get(target.partition("?")[0])
    if make is None:
        return _plain(http.HTTPStatus.NOT_FOUND), method == "GET"
    return await make(), method == "GET"


def _plain(status: http.HTTPStatus) -> Page:
    return Page(f"{status.phrase}\n".encode(), status)


def _head(page: Page) -> bytes:
    lines = (
        f"HTTP/1.1 {int(page.status)} {http.HTTPStatus(page.status).phrase}",
        f"Content-Type: {page.content_type}",
        f"Content-Length: {len(page.body)}",
        "Connection: close",
    )
    return "\r\n".join((*lines, "", "")).encode("ascii")
