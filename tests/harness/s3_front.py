"""What stands between a tier and its server: slow, or with an answer of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

__all__ = ("Front",)

_CHUNK_NBYTES = 16 * 1024


class Front:
    """Takes connections for a server at ``port``.

    ``hides_versions``: answers do not say which version of an object they have.
    ``answer`` is what a request is told instead of being passed on. ``rate`` is how
    many bytes a second all answers together may bring.
    """

    def __init__(self, port: int) -> None:
        self.answer: bytes | None = None
        self.rate: float | None = None
        self.hides_versions = False
        self.port = 0
        self._server_port = port
        self._is_passing = asyncio.Lock()
        self._serving: set[asyncio.Task[Any]] = set()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Front]:
        """Be there until this is left."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in self._serving:
                task.cancel()
            await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            # Its end is told to nobody: asyncio logs that of a cancelled one.
            with contextlib.suppress(
                *(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError)
            ):
                await self._answer(reader, writer)
        finally:
            self._serving.discard(task)
            await _close(writer)

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self.answer is None:
            await self._pass_on(reader, writer)
        else:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(self.answer)
            await writer.drain()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        from_server, to_server = await asyncio.open_connection(
            "127.0.0.1", self._server_port
        )
        asking = asyncio.ensure_future(_copy(reader, to_server))
        try:
            while chunk := await from_server.read(_CHUNK_NBYTES):
                if self.rate is not None:
                    async with self._is_passing:
                        await asyncio.sleep(len(chunk) / self.rate)
                if self.answer is not None:
                    return  # no connection outlives what it was made for
                if self.hides_versions:
                    chunk = chunk.replace(b"\r\nETag:", b"\r\nNone:")
                writer.write(chunk)
                await writer.drain()
        finally:
            asking.cancel()
            await _close(to_server)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while chunk := await reader.read(_CHUNK_NBYTES):
            writer.write(chunk)
            await writer.drain()
    writer.close()


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
