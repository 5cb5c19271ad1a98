"""asyncio streams."""

from __future__ import annotations

import asyncio

from benchmarks.peers.peer import Peer
from benchmarks.peers.work import REQUEST_NBYTES, Piece, Work

__all__ = ("Streams", "StreamsRead")

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
            await self._receive(piece)

    async def aclose(self) -> None:
        if self._writer is None:
            self._server.close()
        else:
            self._writer.close()
            await self._writer.wait_closed()
        await super().aclose()

    async def _receive(self, piece: Piece) -> None:
        piece.scatter(await self._reader.readexactly(piece.nbytes))

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            while True:
                work = Work.decode(await reader.readexactly(REQUEST_NBYTES))
                for piece in self.pool.pieces(work, _MESSAGE_NBYTES):
                    writer.write(piece.gather().data)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # it hung up
        finally:
            writer.close()


class StreamsRead(Streams):
    """The same with ``read``, which joins nothing: faster, and more to write."""

    how = "StreamWriter.write and drain; read of whatever is there, into place"

    async def _receive(self, piece: Piece) -> None:
        landing = piece.landing()
        view, got = landing.data, 0
        while got < len(view):
            data = await self._reader.read(len(view) - got)
            if not data:
                raise ConnectionError("it hung up")
            view[got : got + len(data)] = data
            got += len(data)
        piece.land(landing)
