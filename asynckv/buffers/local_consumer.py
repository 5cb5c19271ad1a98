"""Taking entries from a buffer of this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from asynckv.abc import KVEntry, SelectStream
from asynckv.buffers.entries.entries import Lease
from asynckv.buffers.entries.leases import Leases
from asynckv.buffers.handover import hand_over, lend
from asynckv.buffers.holders import LocalHolder
from asynckv.buffers.queries import Query
from asynckv.buffers.streaming import LocalStream, LocalViews
from asynckv.errors import BufferClosed
from asynckv.tensors.blocks import KVMemory
from asynckv.tensors.copying import CopyPool
from asynckv.types import KVFingerprint

__all__ = ("LocalConsumer",)


class LocalConsumer:
    """The ways to take an entry, with a copy or with the memory itself.

    ``check`` is called first by each, and refuses what must not go on.
    """

    def __init__(
        self,
        leases: Leases,
        pool: CopyPool,
        fingerprint: KVFingerprint | None,
        check: Callable[[], object],
    ) -> None:
        self._leases = leases
        self._pool = pool
        self._fingerprint = fingerprint
        self._check = check

    async def take(self, query: Query, targets: Mapping[str, KVMemory]) -> KVEntry:
        """Do what awaiting a ``drop_select`` does."""
        holder = self._select(query, streams=False)
        try:
            while True:
                lease = await holder.whole_lease()
                entry = await hand_over(lease, self._pool, targets)
                if lease.is_valid:
                    self._leases.acknowledge(lease)
                    return entry
                del entry  # its views: the next may be long in coming
        except BaseException:
            holder.forget()
            raise

    @asynccontextmanager
    async def borrow(
        self, query: Query, targets: Mapping[str, KVMemory]
    ) -> AsyncIterator[KVEntry]:
        """Do what entering a ``drop_select`` does."""
        async with self._holding(query, streams=False) as holder:
            lease, entry = await self._lend(holder, targets)
            yield entry
        self._leases.acknowledge(lease)

    @asynccontextmanager
    async def stream(
        self, query: Query, targets: Mapping[str, KVMemory]
    ) -> AsyncIterator[SelectStream]:
        """Do what entering an ``open_drop_select`` does."""
        opened = self._streaming(LocalStream, query, targets)
        async with opened as stream:
            yield stream

    @asynccontextmanager
    async def views(self, query: Query) -> AsyncIterator[SelectStream]:
        """As :meth:`stream`, with views of the entry's memory in place of copies."""
        async with self._streaming(LocalViews, query, {}) as stream:
            yield stream

    @asynccontextmanager
    async def _streaming(
        self, kind: type[LocalStream], query: Query, targets: Mapping[str, KVMemory]
    ) -> AsyncIterator[LocalStream]:
        async with self._holding(query, streams=True) as holder:
            lease = await holder.shown_lease()
            stream = kind(holder, lease, self._pool, targets)
            self._leases.reach(lease)
            yield stream
        self._leases.acknowledge(lease)
        stream.close()

    @asynccontextmanager
    async def _holding(
        self, query: Query, *, streams: bool
    ) -> AsyncIterator[LocalHolder]:
        holder = self._select(query, streams=streams)
        try:
            yield holder
        except Exception:
            holder.give_back_failed()
            raise
        except BaseException:
            holder.forget()
            raise

    def _select(self, query: Query, *, streams: bool) -> LocalHolder:
        self._check()
        if self._leases.is_closed:
            raise BufferClosed("the buffer is closed")
        holder = LocalHolder(self._leases, streams=streams)
        holder.select(query, self._fingerprint)
        return holder

    async def _lend(
        self, holder: LocalHolder, targets: Mapping[str, KVMemory]
    ) -> tuple[Lease, KVEntry]:
        while True:
            lease = await holder.whole_lease()
            entry = await lend(lease, self._pool, targets)
            if lease.is_valid:
                self._leases.reach(lease)
                return lease, entry
            del entry
