"""The baseline of many outstanding requests: bare asyncio streams, both sides.

One connection, small orders out, constant bytes back in order; it does none of
asynckv's work.
"""

from __future__ import annotations

import asyncio
import collections
import hmac
import time

from asynckv.cli.bench.meeting import ORDER, TOKEN_NBYTES, What, read_order

__all__ = ("StreamsConnection", "StreamsServer")

_MAX_ANSWER_NBYTES = 2**20
_TOKEN_TIMEOUT_S = 5.0


class StreamsServer:
    """Answers orders with constant bytes. Used as a context manager."""

    def __init__(self, host: str, token: bytes) -> None:
        self._host = host
        self._token = token
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> int:
        """Return the port."""
        self._server = await asyncio.start_server(self._answer, self._host, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        try:
            await self._answer_forever(reader, writer)
        except (OSError, ValueError, asyncio.IncompleteReadError):
            pass  # it hung up, or says what no bench says
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer_forever(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        async with asyncio.timeout(_TOKEN_TIMEOUT_S):
            token = await reader.readexactly(TOKEN_NBYTES)
        if not hmac.compare_digest(token, self._token):
            return
        answer = b""
        while True:
            order = read_order(await reader.readexactly(ORDER.size))
            what, _, nbytes = order
            if what is not What.PULL or nbytes > _MAX_ANSWER_NBYTES:
                return
            if len(answer) != nbytes:
                answer = bytes(nbytes)
            writer.write(answer)
            await writer.drain()


class StreamsConnection:
    """The asking side of the exchange. Made by :meth:`open`."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, host: str, port: int, token: bytes) -> StreamsConnection:
        """Connect and show the token."""
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(token)
        return cls(reader, writer)

    async def exchange(
        self, requests: int, outstanding: int, nbytes: int
    ) -> list[float]:
        """Ask ``requests`` times with at most ``outstanding`` open; return seconds.

        :raises asyncio.IncompleteReadError: the peer hung up
        """
        order = ORDER.pack(What.PULL, 1, nbytes)
        began: collections.deque[float] = collections.deque()
        calls: list[float] = []
        for _ in range(min(outstanding, requests)):
            began.append(time.perf_counter())
            self._writer.write(order)
        while began:
            await self._reader.readexactly(nbytes)
            calls.append(time.perf_counter() - began.popleft())
            if len(calls) + len(began) < requests:
                began.append(time.perf_counter())
                self._writer.write(order)
        return calls

    def close(self) -> None:
        """Hang up. Never waits."""
        self._writer.transport.abort()
