"""A lookup buffer at the other end of a link, with the same face as a local one."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final

import torch

from asynckv.abc import (
    InsertWriter,
    KVLookupBuffer,
    KVLookupStatistics,
    KVSource,
    Match,
    SelectStream,
    TokenIds,
)
from asynckv.abc.closing import async_with_only
from asynckv.buffers.entries.entries import Draft, make_draft, specs_in
from asynckv.buffers.local.consumer import PendingSelect
from asynckv.buffers.remote.connection import PeerBuffer, PeerConnection, ask
from asynckv.buffers.remote.insert import RemoteWriter, begin_insert
from asynckv.buffers.remote.select import RemoteConsumer, check_key_fits
from asynckv.devices.tensors import KVOnGpu
from asynckv.links.link import Link
from asynckv.observability.waits import LoggedWait, LoggedWaits
from asynckv.protocol.frames import Peek, Taken, Withdraw
from asynckv.tensors.blocks import KVMemory
from asynckv.tensors.views import spec_like
from asynckv.transfers.manifest import INLINE_NBYTES, check_names, flatten
from asynckv.transfers.source import (
    Source,
    copied_sources,
    release_staged,
    source_of,
    until_made,
)
from asynckv.transfers.targets import check_targets
from asynckv.transfers.tokens import (
    MAX_ID_LENGTH,
    as_mask,
    as_specs,
    as_text,
    as_tokens,
    key_of,
    make_query,
)
from asynckv.types import TensorSpec

__all__ = ("RemoteLookupBuffer", "RemoteStatistics")

_AT_A_TIME: Final = 64
"""So many tensors are looked at in less than half a millisecond."""


class RemoteLookupBuffer(PeerBuffer, KVLookupBuffer):
    """The lookup buffer that a peer serves. It is closed with its peer."""

    def __init__(self, peer: PeerConnection) -> None:
        super().__init__(peer)
        self._consumer = RemoteConsumer(peer)
        room = f"room in the buffer at {peer.url}"
        self._waits = LoggedWaits(_who_waits, room, "a drop_select or a withdraw there")

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As the contract says: in memory of this side's own, which comes back.

        Any contiguous tensor is sent from where it is, without a copy; this one costs
        no page faults either, where that memory was used before. All that live have up
        to ``connect(max_bytes=...)``. After the insert it may be written to again.
        """
        self._peer.check()
        return self._peer.memory.spares.empty(spec_like(shape, dtype))

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
        link, pool = self._peer.link_nowait(), self._peer.pool
        named = flatten(key, value, hidden, extras)
        copies = copied_sources(named, INLINE_NBYTES)
        if copies is not None:
            caught, specs = {}, {name: one.spec for name, one in copies.items()}
        else:
            caught = {name: pool.catch(tensor) for name, tensor in named.items()}
            specs = await specs_in(caught)
        draft = make_draft(
            input_tokens,
            roi,
            specs,
            entry_id=entry_id,
            fingerprint=None,
            ttl_s=ttl_s,
            deliveries=deliveries,
        )
        self._waits.begin(draft)
        try:
            if copies is not None:
                await self._insert(draft, [*copies.values()], link)
            else:
                is_named = entry_id is not None
                await self._insert_from(caught, draft, link, digests=is_named)
        finally:
            self._waits.end(draft)
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
        self._peer.check()
        tokens = as_tokens(input_tokens)
        key = key_of(tokens, as_mask(roi, tokens))
        check_key_fits(key, (await self._peer.link()).limits.max_body_bytes)
        return (await ask(self._peer, Peek(bool(key)), key)).value

    async def taken(self, entry_id: str) -> None:
        self._peer.check()
        entry_id = as_text(entry_id, "an entry_id")
        if len(entry_id) > MAX_ID_LENGTH:
            raise KeyError(f"no entry has an id of {len(entry_id)} characters")
        known_to = (await self._peer.link()).peer.incarnation
        with LoggedWait(f"taken({entry_id})", "the entry's end", "its consumer"):
            question = Taken(entry_id)
            await ask(self._peer, question, deadline_s=None, incarnation=known_to)

    async def withdraw(self, entry_id: str) -> bool:
        self._peer.check()
        entry_id = as_text(entry_id, "an entry_id")
        if len(entry_id) > MAX_ID_LENGTH:
            return False
        return bool((await ask(self._peer, Withdraw(entry_id))).value)

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
        self._peer.check()
        specs = as_specs(specs)
        check_names(specs)
        draft = make_draft(
            input_tokens,
            roi,
            specs,
            entry_id=entry_id,
            fingerprint=None,
            ttl_s=ttl_s,
            deliveries=deliveries,
            streaming=True,
        )
        writer = RemoteWriter(await self._peer.link(), draft, self._peer.routes)
        try:
            self._waits.begin(draft)
            try:
                await writer.granted()
            finally:
                self._waits.end(draft)
            yield writer
            writer.declared.check_whole()
            await writer.commit()
        except BaseException:
            writer.cancel()
            raise

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

    def statistics(self) -> RemoteStatistics:
        return RemoteStatistics(
            max_bytes=self._peer.budget.max_bytes,
            used_bytes=self._peer.budget.used_bytes,
            waiting_inserts=len(self._waits),
            waiting_selects=self._consumer.waiting,
            is_connected=self._peer.is_connected,
        )

    @property
    def sends_from(self) -> str:
        """The GPU from which what is put goes to the buffer's now, else ``"cpu"``."""
        return self._peer.sends_from

    @property
    def reads_gpu_memory(self) -> bool:
        """Does a ``drop_select`` read a peer's memory of this side's own GPU now?"""
        return self._peer.reads_gpu

    async def _digest(self, sources: Sequence[Source]) -> None:
        """Let each know its digest."""
        digests = await self._peer.pool.digest([one.place() for one in sources])
        for source, digest in zip(sources, digests, strict=True):
            source.digest = digest

    async def _insert_from(
        self,
        named: Mapping[str, KVMemory | KVOnGpu],
        draft: Draft,
        link: Link | None,
        *,
        digests: bool,
    ) -> None:
        """Insert what is read where it lies; with ``digests`` from the start."""
        pool, nbytes = self._peer.pool, draft.layout.nbytes
        staging = self._peer.routes.staging(link, nbytes)
        sources: list[Source] = []
        try:
            for index, tensor in enumerate(named.values(), 1):
                sources += [await source_of(tensor, pool, staging, nbytes)]
                if not index % _AT_A_TIME:
                    await asyncio.sleep(0)
            await until_made(sources, pool)
            if digests:
                await self._digest(sources)
            await self._insert(draft, sources, link)
        except RuntimeError:
            self._peer.link_nowait()  # raises if the peer was closed: the pool is then
            raise
        finally:
            release_staged(sources)

    async def _insert(
        self, draft: Draft, sources: Sequence[Source], link: Link | None
    ) -> None:
        """Insert, by ``link`` if it is up, and again on the next one while links are
        cut.

        A peer that came back empty may have had the entry before, committed and
        even acknowledged: putting it in again could deliver it twice, and saying
        nothing could lose it. So only the caller can decide, unless no byte of it
        ever left: then it was a call that waited for room, which goes on.
        """
        incarnation = ""
        while True:
            while link is None or not link.is_open:
                link = await self._peer.link(incarnation)
            inserting = begin_insert(link, draft, sources, self._peer.routes)
            if await inserting.accepted():
                return
            if inserting.may_be_in:
                incarnation = link.peer.incarnation
            link = await self._peer.link(incarnation)
            if not all(source.digest for source in sources):
                await self._digest(sources)


def _who_waits(draft: Draft) -> str:
    call = "open_insert" if draft.streaming else "insert"
    return f"{call} of {draft.entry_id} ({draft.nbytes} bytes)"


@dataclasses.dataclass(frozen=True)
class RemoteStatistics(KVLookupStatistics):
    """This side of a lookup buffer at a peer."""

    is_connected: bool
