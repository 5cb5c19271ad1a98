"""pyzmq: a pair of sockets over TCP, with zmq.asyncio."""

from __future__ import annotations

import asyncio

import zmq
import zmq.asyncio

from benchmarks.peers.peer import Peer
from benchmarks.peers.work import Work

__all__ = ("ZmqPair",)

_MESSAGE_NBYTES = 16 * 2**20


class ZmqPair(Peer):
    """A frame for each layer, sent and received without a copy; one into place."""

    how = "zmq.asyncio PAIR, copy=False both ways, one frame a layer, blocks joined"
    packages = ("pyzmq",)
    _answering: asyncio.Task[None] | None = None

    def _socket(self) -> zmq.asyncio.Socket:
        self._context = zmq.asyncio.Context()
        socket = self._context.socket(zmq.PAIR)
        socket.setsockopt(zmq.LINGER, 0)
        return socket

    async def serve(self) -> str:
        self._pair = self._socket()
        port = self._pair.bind_to_random_port("tcp://127.0.0.1")
        self._answering = asyncio.create_task(self._answer())
        return str(port)

    async def connect(self, address: str) -> None:
        self._pair = self._socket()
        self._pair.connect(f"tcp://127.0.0.1:{address}")

    async def pull(self, work: Work) -> None:
        await self._pair.send(work.encode())
        for piece in self.pool.pieces(work, _MESSAGE_NBYTES):
            frame = await self._pair.recv(copy=False)
            piece.scatter(frame.buffer)

    async def aclose(self) -> None:
        if self._answering is not None:
            self._answering.cancel()
            await asyncio.wait({self._answering})
        self._pair.close()
        self._context.term()
        await super().aclose()

    async def _answer(self) -> None:
        while True:
            work = Work.decode(await self._pair.recv())
            for piece in self.pool.pieces(work, _MESSAGE_NBYTES):
                await self._pair.send(piece.gather().data, copy=False)
