"""Arrow Flight: record batches over gRPC, in C++."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow
import pyarrow.flight

from benchmarks.peers.peer import Peer
from benchmarks.peers.work import Bytes, Work

__all__ = ("Flight",)

_MESSAGE_NBYTES = 16 * 2**20
_SCHEMA = pyarrow.schema([("bytes", pyarrow.uint8())])


class Flight(Peer):
    """``do_get``; a batch for each layer, one copy into place."""

    how = "do_get in a thread, one record batch a layer, blocks joined"
    packages = ("pyarrow",)
    _server: pyarrow.flight.FlightServerBase | None = None

    async def serve(self) -> str:
        self._server = _Server(self)
        return str(self._server.port)

    async def connect(self, address: str) -> None:
        self._client = pyarrow.flight.connect(f"grpc://127.0.0.1:{address}")

    async def pull(self, work: Work) -> None:
        await self.in_thread(self._pull, work)

    async def aclose(self) -> None:
        if self._server is None:
            self._client.close()
        else:
            await self.in_thread(self._server.shutdown)
        await super().aclose()

    def batches(self, work: Work) -> Iterator[pyarrow.RecordBatch]:
        """Yield what answers a ticket."""
        for piece in self.pool.pieces(work, _MESSAGE_NBYTES):
            yield _batch_of(piece.gather())

    def _pull(self, work: Work) -> None:
        ticket = pyarrow.flight.Ticket(work.encode())
        reader = self._client.do_get(ticket)
        for piece in self.pool.pieces(work, _MESSAGE_NBYTES):
            column = reader.read_chunk().data.column(0)
            piece.scatter(column.to_numpy())


class _Server(pyarrow.flight.FlightServerBase):  # type: ignore[misc]
    def __init__(self, source: Flight) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._source = source

    def do_get(
        self, context: object, ticket: pyarrow.flight.Ticket
    ) -> pyarrow.flight.GeneratorStream:
        batches = self._source.batches(Work.decode(ticket.ticket))
        return pyarrow.flight.GeneratorStream(_SCHEMA, batches)


def _batch_of(array: Bytes) -> pyarrow.RecordBatch:
    buffers = [None, pyarrow.py_buffer(array)]
    column = pyarrow.Array.from_buffers(pyarrow.uint8(), array.nbytes, buffers)
    return pyarrow.RecordBatch.from_arrays([column], schema=_SCHEMA)
