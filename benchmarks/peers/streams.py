"""asyncio streams, and anyio's socket streams on asyncio."""

from __future__ import annotations

import asyncio

import anyio
import anyio.abc
from anyio.streams.buffered import BufferedByteReceiveStream

from benchmarks.peers.peer import Peer
from benchmarks.peers.work import REQUEST_NBYTES, Bytes, Piece, Work

__all__ = ("AnyioStreams", "Streams", "StreamsRead")

_MESSAGE_NBYTES = 16 * 2**20
_ANYIO_NBYTES = 2**20


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


class AnyioStreams(Peer):
    """One connection; ``receive`` and a copy into place."""

    how = "SocketStream.send; receive of up to 1 MiB, blocks joined"
    packages = ("anyio",)
    _serving: asyncio.Task[None] | None = None
    _listener: anyio.abc.Listener[anyio.abc.SocketStream]
    _stream: anyio.abc.SocketStream

    async def serve(self) -> str:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        self._serving = asyncio.create_task(listener.serve(self._answer))
        self._listener = listener
        return str(port)

    async def connect(self, address: str) -> None:
        self._stream = await anyio.connect_tcp("127.0.0.1", int(address))

    async def pull(self, work: Work) -> None:
        await self._stream.send(work.encode())
        for piece in self.pool.pieces(work, _ANYIO_NBYTES):
            landing = piece.landing()
            await self._receive_into(landing)
            piece.land(landing)

    async def aclose(self) -> None:
        if self._serving is None:
            await self._stream.aclose()
        else:
            self._serving.cancel()
            await asyncio.wait({self._serving})
            await self._listener.aclose()
        await super().aclose()

    async def _receive_into(self, landing: Bytes) -> None:
        view, got = landing.data, 0
        while got < len(view):
            data = await self._stream.receive(len(view) - got)
            view[got : got + len(data)] = data
            got += len(data)

    async def _answer(self, stream: anyio.abc.SocketStream) -> None:
        requests = BufferedByteReceiveStream(stream)
        try:
            while True:
                work = Work.decode(await requests.receive_exactly(REQUEST_NBYTES))
                for piece in self.pool.pieces(work, _ANYIO_NBYTES):
                    # Typed for bytes, it takes what the transport does.
                    await stream.send(piece.gather().data)  # type: ignore[arg-type]
        except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError):
            pass  # it hung up
        finally:
            await stream.aclose()
