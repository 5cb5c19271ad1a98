"""NIXL over UCX: one-sided reads of registered memory, completed by polling."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from typing import Any, ClassVar

import nixl_cu12
import nixl_cu12._api

from benchmarks.peers.peer import Peer
from benchmarks.peers.work import Work

__all__ = ("Nixl", "NixlTcp")

_SOURCE, _TARGET = "source", "target"


class Nixl(Peer):
    """Prepared once for each work, outside of what is timed; then posted and polled.

    UCX chooses: on one host it is shared memory.
    """

    how = "READ of all blocks in one prepared transfer, polled in the event loop"
    packages = ("nixl-cu12",)
    polls = True
    same_host = True

    async def serve(self) -> str:
        agent = self._make_agent(_SOURCE, progresses=True)
        metadata = base64.b64encode(agent.get_agent_metadata()).decode()
        return f"{self.pool.address} {metadata}"

    async def connect(self, address: str) -> None:
        # Its own polls are its progress; a thread would take CPU from the others.
        agent = self._make_agent(_TARGET, progresses=False)
        base, metadata = address.split()
        agent.add_remote_agent(base64.b64decode(metadata))
        self._transfers = {}
        for work in self.works:
            here = agent.get_xfer_descs(_places(work, self.pool.address), "DRAM")
            there = agent.get_xfer_descs(_places(work, int(base)), "DRAM")
            self._transfers[work.name] = agent.initialize_xfer(
                "READ", here, there, _SOURCE
            )

    async def pull(self, work: Work) -> None:
        transfer = self._transfers[work.name]
        state = self._agent.transfer(transfer)
        while state == "PROC":
            await asyncio.sleep(0)
            state = self._agent.check_xfer_state(transfer)
        if state != "DONE":
            raise ConnectionError(f"the transfer is in state {state}")

    def _make_agent(self, name: str, *, progresses: bool) -> Any:
        config = nixl_cu12._api.nixl_agent_config(
            enable_prog_thread=progresses, backends=["UCX"]
        )
        self._agent = nixl_cu12._api.nixl_agent(name, config)
        everything = [(self.pool.address, self.pool.array.nbytes, 0, "")]
        self._registered = self._agent.register_memory(everything, "DRAM")
        return self._agent


class NixlTcp(Nixl):
    """The same where there is no shared memory."""

    environ: ClassVar[Mapping[str, str]] = {"UCX_TLS": "tcp"}
    same_host = False


def _places(work: Work, base: int) -> list[tuple[int, int, int]]:
    return [(base + index * work.stride, work.nbytes, 0) for index in range(work.parts)]
