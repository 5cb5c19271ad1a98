"""The requests that one link makes of a lookup buffer, and what they share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol

from asynckv.buffers.entries.entries import EntryState
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.serving.devices import BufferExport, DeviceService
from asynckv.buffers.serving.service import LinkBytes, Service
from asynckv.errors import RemoteProtocolError
from asynckv.links.link import Link
from asynckv.protocol.handshake import DigestMode
from asynckv.sharing.exporter import Importer
from asynckv.sharing.gpu_channel import GpuLink
from asynckv.transfers.host_copies import D2HCopier

__all__ = ("LookupRequests",)


class _Query(Protocol):
    """What waits for an entry."""

    def wait_no_longer(self) -> None:
        """The server leaves."""


class LookupRequests(Service):
    """Those that one link makes of ``buffer``.

    ``kept`` is charged for what they keep while they are open. ``export`` is what
    the peer is shown of the buffer's memory, and compares a ``map_digest`` of;
    ``devices`` connects its GPU with the buffer's.
    """

    def __init__(
        self,
        buffer: LookupBuffer,
        link: Link,
        kept: LinkBytes,
        devices: DeviceService,
        map_digest: DigestMode = "edges",
    ) -> None:
        super().__init__(link)
        self.devices = devices
        self.export = BufferExport(link, buffer.exporter, map_digest)
        self.buffer = buffer
        self.kept = kept
        self.leases = buffer.ledger.leases
        self.deliveries: set[object] = set()
        self.selects: set[_Query] = set()
        self.predecessors: tuple[LookupRequests, ...] = ()
        self.pins: dict[int, list[tuple[Importer, int]]] = {}
        """What was offered on a stream and may be read there; few waiters have any."""
        self._d2h = D2HCopier(buffer.pool, devices.copies, link.payload.feeds)
        self._charged_bytes = 0
        self._inserts: dict[asyncio.Task[None], str] = {}

    @property
    def is_idle(self) -> bool:
        """Nothing is under way for this peer; what waits for room is not."""
        entries = self.buffer.ledger.table.entries
        return not self.deliveries and all(
            (entry := entries.get(entry_id)) is not None
            and entry.state is EntryState.WAITING
            for entry_id in self._inserts.values()
        )

    def d2h(self, link: Link) -> D2HCopier:
        """Return what brings a delivery to the host that is on the buffer's GPU."""
        return self._d2h

    def nccl(self, link: Link) -> GpuLink:
        """Return what leads to the peer's GPU, or did.

        :raises RemoteProtocolError: nothing ever did
        """
        if self.devices.way is None:
            raise RemoteProtocolError("a grant of memory that nothing leads to")
        return self.devices.way

    def run_insert(
        self,
        run: Callable[[], Coroutine[Any, Any, None]],
        entry_id: str,
        nbytes: int,
    ) -> asyncio.Task[None]:
        """Own the task of one insert, which keeps so many bytes until it ends.

        :raises Overloaded: they cannot be kept; nothing was begun
        """
        self.kept.inserts.take(nbytes)
        task = self.run(run(), f"insert of {entry_id}")
        self._inserts[task] = entry_id
        task.add_done_callback(partial(self._insert_ended, nbytes))
        return task

    async def after_predecessors(self) -> None:
        """Wait until nothing of the peer's link before this one is left.

        What was sent again would else meet itself. Bounded: it was cancelled.
        """
        for service in self.predecessors:
            await service.wait_ended()
        self.predecessors = ()

    def drain(self) -> None:
        super().drain()
        for select in list(self.selects):
            select.wait_no_longer()

    def may_charge(self, nbytes: int) -> bool:
        """Can the peer's receive bound, and ours, take bytes that have no room?"""
        bound = self.link.peer_limits.max_receive_bytes
        memory = self.buffer.ledger.table.memory
        return self._charged_bytes + nbytes <= bound and memory.may_place_outside(
            nbytes
        )

    def charge(self, nbytes: int) -> None:
        """Charge the peer for such bytes; a negative number gives back."""
        self._charged_bytes += nbytes
        if nbytes < 0:
            self.buffer.ledger.offer_waiting_soon()

    def notify_idle(self) -> None:
        """Something ended: let who waits for the end of all look again."""
        self.buffer.room.change()

    async def wait_idle(self) -> None:
        await self.buffer.room.until(lambda: self.is_idle)

    def _insert_ended(self, nbytes: int, task: asyncio.Task[None]) -> None:
        del self._inserts[task]
        self.kept.inserts.give(nbytes)
        if self.is_draining:
            self.notify_idle()
