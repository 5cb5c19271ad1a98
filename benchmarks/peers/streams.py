"""asyncio streams."""

from __future__ import annotations

import asyncio

from benchmarks.peers.peer import Peer
from benchmarks.peers.work import REQUEST_NBYTES, Work

__all__ = ("Streams",)

_MESSAGE_NBYTES = 16 * 2**20


class Streams(Peer):
    """One connection; ``readexactly`` and a copy into place."""

    how = "StreamWriter.write and drain; readexactly of a layer, or of joined blocks"
    _server: asyncio.Server
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter | None = None

    async def serve(self) -> str:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        return str(self._server.sockets[0].getsockname()[1])

    async def connect(self, address: str) -> None:
        self._reader, self._writer = await asyncio.open_connection(
            "127.0.0.1", int(address)
        )

    async def pull(self, work: Work) -> None:
        if self._writer is None:
            raise ConnectionError("not connected")
        self._writer.write(work.encode())
        for piece in self.pool.pieces(work, _MESSAGE_NBYTES):
            piece.scatter(await self._reader.readexactly(piece.nbytes))

    async def aclose(self) -> None:
        if self._writer is None:
            self._server.close()
        else:
            self._writer.close()
            await self._writer.wait_closed()
        await super().aclose()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            while True:
                work = Work.decode(await reader.readexactly(REQUEST_NBYTES))
                for piece in self.pool.pieces(work, _MESSAGE_NBYTES):
                    writer.write(memoryview(piece.gather()))
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # it hung up
        finally:
            writer.close()
