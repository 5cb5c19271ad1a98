"""A line to a server that is slow, breaks, or says something else, as it is told to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

__all__ = ("Line", "line_to")

_HOST: Final = "127.0.0.1"
_CHUNK_NBYTES: Final = 64 * 1024


class Line:
    """Passes on what comes, both ways.

    ``rate``: so many bytes a second each way, of all connections together. ``says`` is
    answered to whatever is asked, and nothing is passed on. With ``cuts_after`` the
    connection ends when so much has come back.
    """

    def __init__(self, port: int) -> None:
        self.port = 0
        self.rate: float | None = None
        self.says: bytes | None = None
        self.cuts_after: int | None = None
        self._to_port = port
        self._ways = (asyncio.Lock(), asyncio.Lock())
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Pass on what comes by one connection, until either side ends it."""
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
        try:
            there = await asyncio.open_connection(_HOST, self._to_port)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._ask(reader, writer, there[1]))
                    group.create_task(self._answer(there[0], writer))
            finally:
                there[1].transport.abort()
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            if task is not None:
                self._tasks.discard(task)

    async def aclose(self) -> None:
        """End all connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _ask(
        self,
        reader: asyncio.StreamReader,
        back: asyncio.StreamWriter,
        writer: asyncio.StreamWriter,
    ) -> None:
        while data := await reader.read(_CHUNK_NBYTES):
            if self.says is not None:
                back.write(self.says)
                await back.drain()
                continue
            await self._take_time(0, len(data))
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(_CHUNK_NBYTES):
            if self.cuts_after is not None:
                data = data[: self.cuts_after]
                self.cuts_after -= len(data)
            await self._take_time(1, len(data))
            writer.write(data)
            await writer.drain()
            if self.cuts_after == 0:
                break
        raise ConnectionResetError

    async def _take_time(self, way: int, nbytes: int) -> None:
        if self.rate is not None:
            async with self._ways[way]:
                await asyncio.sleep(nbytes / self.rate)


@contextlib.asynccontextmanager
async def line_to(port: int) -> AsyncIterator[Line]:
    """Have a line to who listens on ``port``."""
    line = Line(port)
    server = await asyncio.start_server(line.serve, _HOST, 0)
    line.port = server.sockets[0].getsockname()[1]
    try:
        yield line
    finally:
        server.close()
        await line.aclose()
