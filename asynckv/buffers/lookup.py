"""The lookup buffer itself, in the process that holds the entries."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Final

import anyio
import torch

from asynckv.abc import (
    InsertWriter,
    KVLookupBuffer,
    KVSource,
    Match,
    SelectStream,
    TokenIds,
)
from asynckv.abc.closing import async_with_only
from asynckv.buffers.entries.admission import Admission
from asynckv.buffers.entries.entries import make_draft, specs_in
from asynckv.buffers.entries.ledger import Ledger
from asynckv.buffers.in_memory import InMemoryBuffer
from asynckv.buffers.local.consumer import LocalConsumer, PendingSelect
from asynckv.buffers.local.writer import LocalSource, LocalViews, LocalWriter
from asynckv.buffers.statistics import LookupStatistics
from asynckv.devices.names import DeviceName
from asynckv.tensors.blocks import KVMemory
from asynckv.tensors.views import spec_like
from asynckv.transfers.manifest import check_names, flatten
from asynckv.transfers.targets import check_targets
from asynckv.transfers.tokens import (
    as_mask,
    as_specs,
    as_text,
    as_tokens,
    key_of,
    make_query,
)
from asynckv.types import KVFingerprint, TensorSpec, as_count, as_timeout
from asynckv.waits.waiting import wait_shielded

__all__ = ("LookupBuffer",)

_CANCELLED_S: Final = 1.0
"""A close that is cancelled waits no longer for threads and peers."""


class LookupBuffer(InMemoryBuffer, KVLookupBuffer):
    """Entries in this process's memory, for consumers here and, served, elsewhere.

    ``max_bytes`` is a hard bound on the bytes held, tokens included. An entry
    that fails in ``max_deliver`` consumers is dropped. ``max_hold_s`` bounds
    how long an entry may be on its way to a consumer, and then how long it may
    stay inside ``async with drop_select(...)``.
    ``fingerprint`` says what model the entries belong to: only consumers with
    an equal one find them.

    With ``device="cuda:0"`` the bytes are in memory of that GPU, allocated at once
    when the buffer is entered, and so is what it hands out; what is inserted may be
    there or in host memory. Entries of up to 64 KiB stay in host memory meanwhile.

    Closing it refuses inserts, lets consumers take what is left for at most
    ``drain_s`` (not at all when left by an error), then ends every wait with
    ``BufferClosed``. A cancel ends that drain: the rest of closing is done within 1 s,
    however often it is cancelled. Entries that nobody took are logged, and counted as
    ``dropped``.
    """

    def __init__(
        self,
        max_bytes: int | float | str = "2GiB",
        *,
        fingerprint: KVFingerprint | Mapping[str, str] | str | None = None,
        max_deliver: int = 5,
        max_hold_s: float | None = None,
        drain_s: float = 30.0,
        device: DeviceName | None = None,
    ) -> None:
        max_deliver = as_count(max_deliver, "max_deliver")
        if max_hold_s is not None and as_timeout(max_hold_s, "max_hold_s") == 0:
            raise ValueError("max_hold_s is above 0; None means no end")
        self.fingerprint = KVFingerprint.of(fingerprint)
        super().__init__(max_bytes, lambda: self.room.change(), device)
        self._drain_s = as_timeout(drain_s, "drain_s")
        self.ledger = Ledger(
            self._arena, max_deliver=max_deliver, max_hold_s=max_hold_s
        )
        self.room = self.ledger.room
        self.admission = Admission(self.ledger)
        self._ending: asyncio.Task[None] | None = None
        self._consumer = LocalConsumer(
            self.ledger.leases, self.pool, self.fingerprint, self._check_loop
        )

    def __repr__(self) -> str:
        entries = len(self.ledger.table.entries) - self.ledger.waiting_inserts
        return self._shown(f"{entries} entries")

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As the contract says; it counts as ``pinned_bytes`` of the statistics."""
        self._check_loop()
        return self.growth.spares.empty(spec_like(shape, dtype))

    async def insert(
        self,
        input_tokens: TokenIds | None,
        roi: TokenIds | None,
        key: KVSource,
        value: KVSource,
        hidden: KVMemory | None,
        *,
        extras: Mapping[str, KVMemory] | None = None,
        entry_id: str | None = None,
        ttl_s: float | None = 600.0,
        deliveries: int = 1,
    ) -> str:
        self._check_loop()
        named = flatten(key, value, hidden, extras)
        await self.open()
        tensors = {name: self.pool.catch(tensor) for name, tensor in named.items()}
        draft = make_draft(
            input_tokens,
            roi,
            await specs_in(tensors),
            entry_id=entry_id,
            ttl_s=ttl_s,
            deliveries=deliveries,
            fingerprint=self.fingerprint,
            borrowed=self.growth.spares.regions_of(tensors.values()),
        )
        self.ledger.check_open()
        source = LocalSource(tensors, self.pool)
        digest = None
        # What is new here need not be read once more to know whether it goes on.
        if entry_id is not None and self.ledger.table.is_known(entry_id):
            digest = await source.digest(draft)
        await self.admission.insert(draft, source, digest)
        return draft.entry_id

    def drop_select(
        self,
        input_tokens: TokenIds | None = None,
        roi: TokenIds | None = None,
        *,
        entry_id: str | None = None,
        match: Match = "prefix",
        min_matched_tokens: int = 1,
        into: Mapping[str, KVMemory] | None = None,
    ) -> PendingSelect:
        query = make_query(
            input_tokens,
            roi,
            entry_id=entry_id,
            match=match,
            min_matched_tokens=min_matched_tokens,
        )
        consumer = self._consumer
        targets = check_targets(into)
        return PendingSelect(consumer.take, consumer.borrow, query, targets)

    async def peek(
        self, input_tokens: TokenIds | None = None, roi: TokenIds | None = None
    ) -> int:
        self._check_loop()
        tokens = as_tokens(input_tokens)
        key = key_of(tokens, as_mask(roi, tokens))
        return self.ledger.leases.peek(key, self.fingerprint)

    async def taken(self, entry_id: str) -> None:
        self._check_loop()
        await self.ledger.table.when_gone(as_text(entry_id, "an entry_id"))

    async def withdraw(self, entry_id: str) -> bool:
        self._check_loop()
        return self.ledger.withdraw(as_text(entry_id, "an entry_id"))

    @async_with_only("open_insert(...) as writer")
    async def open_insert(
        self,
        input_tokens: TokenIds | None,
        roi: TokenIds | None,
        specs: Mapping[str, TensorSpec],
        *,
        entry_id: str | None = None,
        ttl_s: float | None = 600.0,
        deliveries: int = 1,
    ) -> AsyncIterator[InsertWriter]:
        self._check_loop()
        specs = as_specs(specs)
        check_names(specs)
        await self.open()
        draft = make_draft(
            input_tokens,
            roi,
            specs,
            entry_id=entry_id,
            ttl_s=ttl_s,
            deliveries=deliveries,
            fingerprint=self.fingerprint,
            streaming=True,
        )
        entry = await self.admission.begin(draft)
        writer = LocalWriter(entry, self.ledger, self.pool)
        try:
            yield writer
            writer.declared.check_whole()
        except BaseException:
            self.admission.abort(entry)
            raise
        finally:
            writer.declared.is_closed = True
        await self.admission.finish(entry)

    @async_with_only("open_drop_select(...) as stream")
    async def open_drop_select(
        self,
        input_tokens: TokenIds | None = None,
        roi: TokenIds | None = None,
        *,
        entry_id: str | None = None,
        match: Match = "prefix",
        min_matched_tokens: int = 1,
        into: Mapping[str, KVMemory] | None = None,
    ) -> AsyncIterator[SelectStream]:
        query = make_query(
            input_tokens,
            roi,
            entry_id=entry_id,
            match=match,
            min_matched_tokens=min_matched_tokens,
        )
        targets = check_targets(into)
        async with self._consumer.stream(query, targets) as stream:
            yield stream

    @async_with_only("open_views(...) as stream")
    async def open_views(self, entry_id: str) -> AsyncIterator[SelectStream]:
        """As ``open_drop_select(entry_id=)``, with views of its memory for copies.

        For a buffer on a GPU alone. Nobody may write to a view, and its memory is
        nobody else's while it lives: whoever keeps one keeps it from others.

        :raises RuntimeError: the buffer is in host memory, which knows of no views
        """
        if not self.is_on_gpu:
            raise RuntimeError(
                "open_views() is for a buffer on a GPU: use open_drop_select() here"
            )
        query = make_query(None, None, entry_id=entry_id)
        async with self._consumer.stream(query, {}, LocalViews) as stream:
            yield stream

    def statistics(self) -> LookupStatistics:
        ledger = self.ledger
        now = self._loop.time() if self._loop is not None else 0.0
        waiting = self.ledger.waiting_inserts
        return LookupStatistics(
            mapped_by=self.exporter.mapped_by,
            outside_bytes=ledger.table.memory.outside_bytes,
            entries=len(ledger.table.entries) - waiting,
            leased=ledger.leases.leased_entries,
            waiting_inserts=waiting,
            waiting_selects=ledger.leases.waiting_count,
            oldest_insert_wait_s=self.room.longest_wait_s(now),
            **self._memory_statistics(),
            **dataclasses.asdict(ledger.counters),
        )

    async def aclose(self) -> None:
        await self._close(self._drain_s)

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._close(self._drain_s if exc_type is None else 0)

    def abort(self) -> None:
        self.ledger.close()
        self._close_memory()

    async def _close(self, drain_s: float) -> None:
        self._check_loop()
        try:
            self.ledger.refuse_inserts()
            table, leases = self.ledger.table, self.ledger.leases
            with anyio.move_on_after(drain_s):
                await self.room.until(lambda: not table.entries or leases.is_closed)
            for _ in self.ledger.closing():
                await asyncio.sleep(0)
            self.abort()
            ending = self._end()
            await asyncio.wait({ending})
        except BaseException:
            self.abort()
            await wait_shielded(self._end(), timeout_s=_CANCELLED_S)
            raise
        ending.result()

    def _end(self) -> asyncio.Task[None]:
        """Wait, in a task of its own, for all that closing leaves to wait for."""
        if self._ending is None or self._ending.done():
            self._ending = asyncio.create_task(
                self._wait_closed(self.room), name="asynckv: a buffer is closed"
            )
        return self._ending
