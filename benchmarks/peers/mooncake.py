"""Mooncake's transfer engine over TCP: batched reads of registered memory, blocking."""

from __future__ import annotations

from mooncake.engine import TransferEngine

from benchmarks.peers.peer import Peer
from benchmarks.peers.work import Work

__all__ = ("Mooncake",)

_BATCH = 256
_HOST = "127.0.0.1"


class Mooncake(Peer):
    """At most 256 entries a batch: with 10,000 its server went away."""

    how = "batch_transfer_sync_read in a thread, at most 256 entries a batch"
    packages = ("mooncake-transfer-engine-non-cuda",)

    async def serve(self) -> str:
        await self.in_thread(self._start)
        return f"{self._engine.get_rpc_port()} {self.pool.address}"

    async def connect(self, address: str) -> None:
        await self.in_thread(self._start)
        port, base = map(int, address.split())
        self._session, self._base = f"{_HOST}:{port}", base

    async def pull(self, work: Work) -> None:
        await self.in_thread(self._pull, work)

    async def aclose(self) -> None:
        self._engine.unregister_memory(self.pool.address)
        await super().aclose()

    def _start(self) -> None:
        self._engine = TransferEngine()
        for status in (
            self._engine.initialize(_HOST, "P2PHANDSHAKE", "tcp", ""),
            self._engine.register_memory(self.pool.address, self.pool.array.nbytes),
        ):
            if status:
                raise ConnectionError(f"the engine answers {status}")

    def _pull(self, work: Work) -> None:
        here = [self.pool.address + i * work.stride for i in range(work.parts)]
        there = [self._base + i * work.stride for i in range(work.parts)]
        for first in range(0, work.parts, _BATCH):
            some = slice(first, first + _BATCH)
            sizes = [work.nbytes] * len(here[some])
            status = self._engine.batch_transfer_sync_read(
                self._session, here[some], there[some], sizes
            )
            if status:
                raise ConnectionError(f"the engine answers {status}")
