"""gRPC with grpc.aio: bytes as they are, without protobuf."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import grpc.aio

from benchmarks.peers.peer import Peer
from benchmarks.peers.work import Work

__all__ = ("GrpcAio",)

_MESSAGE_NBYTES = 2**20
_METHOD = "/peers.Pool/Pull"
_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
)


class GrpcAio(Peer):
    """A call with one request and a stream of messages; one copy into place."""

    how = "grpc.aio unary-stream of raw bytes, messages of 1 MiB, blocks joined"
    packages = ("grpcio",)
    _server: grpc.aio.Server | None = None

    async def serve(self) -> str:
        self._server = grpc.aio.server(options=_OPTIONS)
        service, name = _METHOD.strip("/").split("/")
        pull = grpc.unary_stream_rpc_method_handler(self._answer)
        handler = grpc.method_handlers_generic_handler(service, {name: pull})
        self._server.add_generic_rpc_handlers((handler,))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return str(port)

    async def connect(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(
            f"127.0.0.1:{address}", options=_OPTIONS
        )
        self._call = self._channel.unary_stream(_METHOD)

    async def pull(self, work: Work) -> None:
        messages = self._call(work.encode())
        for piece in self.pool.pieces(work, _MESSAGE_NBYTES):
            piece.scatter(await messages.read())

    async def aclose(self) -> None:
        if self._server is None:
            await self._channel.close()
        else:
            await self._server.stop(grace=1)
        await super().aclose()

    async def _answer(self, request: bytes, context: object) -> AsyncIterator[bytes]:
        for piece in self.pool.pieces(Work.decode(request), _MESSAGE_NBYTES):
            yield piece.gather().tobytes()
