"""anyio's socket streams, on asyncio."""

from __future__ import annotations

import asyncio

import anyio
import anyio.abc
from anyio.streams.buffered import BufferedByteReceiveStream

from benchmarks.peers.peer import Peer
from benchmarks.peers.work import REQUEST_NBYTES, Bytes, Work

__all__ = ("AnyioStreams",)

_MESSAGE_NBYTES = 2**20


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
        for piece in self.pool.pieces(work, _MESSAGE_NBYTES):
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
                for piece in self.pool.pieces(work, _MESSAGE_NBYTES):
                    # Typed for bytes, it takes what the transport does.
                    await stream.send(piece.gather().data)  # type: ignore[arg-type]
        except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError):
            pass  # it hung up
        finally:
            await stream.aclose()
