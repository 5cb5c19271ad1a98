"""A lookup buffer at the other end of a link, with the same face as a local one."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import torch

from asynckv.abc import (
    InsertWriter,
    KVEntry,
    KVLookupBuffer,
    KVTensors,
    Match,
    SelectStream,
    TokenIds,
)
from asynckv.buffers.asking import ask
from asynckv.buffers.contents import check_names, flatten
from asynckv.buffers.drop_select import PendingSelect
from asynckv.buffers.entries import Draft
from asynckv.buffers.handover import check_targets
from asynckv.buffers.inserting import Inserting
from asynckv.buffers.lookup import make_draft
from asynckv.buffers.pushing import RemoteWriter, dense
from asynckv.buffers.queries import (
    MAX_ID_LENGTH,
    TOKEN_NBYTES,
    Query,
    as_mask,
    as_tokens,
    key_of,
    make_query,
)
from asynckv.buffers.remote_stream import RemoteStream
from asynckv.buffers.selecting import Delivery, Selecting, check_key_fits
from asynckv.errors import EntryAborted, LeaseLost, PeerLost, PeerRestarted
from asynckv.observability.waits import LoggedWait, LoggedWaits
from asynckv.protocol.frames import Peek, Settle, Taken, Withdraw
from asynckv.tensors.views import spec_of
from asynckv.types import TensorSpec

if TYPE_CHECKING:
    from asynckv.buffers.remote import Peer

__all__ = ("RemoteLookupBuffer", "RemoteStatistics")


class RemoteLookupBuffer(KVLookupBuffer):
    """The lookup buffer that a peer serves. It is closed with its peer."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._selecting = 0
        self._waits = LoggedWaits(
            "drop_select of %s tokens", "a match", f"an insert at {peer.url}"
        )
        self._inserting = 0

    async def insert(
        self,
        input_tokens: TokenIds | None,
        roi: TokenIds | None,
        key: KVTensors,
        value: KVTensors,
        hidden: torch.Tensor | None,
        *,
        extras: Mapping[str, torch.Tensor] | None = None,
        entry_id: str | None = None,
        ttl_s: float | None = 600.0,
        deliveries: int = 1,
    ) -> str:
        self._peer.check()
        named = flatten(key, value, hidden, extras)
        draft = make_draft(
            input_tokens,
            roi,
            {name: spec_of(tensor) for name, tensor in named.items()},
            entry_id=entry_id,
            fingerprint=None,
            ttl_s=ttl_s,
            deliveries=deliveries,
        )
        pool = self._peer.pool
        tensors = [await dense(tensor, pool) for tensor in named.values()]
        digests = None if entry_id is None else await pool.digest(tensors)
        self._inserting += 1
        try:
            await self._insert(draft, tensors, digests)
        finally:
            self._inserting -= 1
        return draft.entry_id

    def drop_select(
        self,
        input_tokens: TokenIds | None = None,
        roi: TokenIds | None = None,
        *,
        entry_id: str | None = None,
        match: Match = "prefix",
        min_matched_tokens: int = 1,
        into: Mapping[str, torch.Tensor] | None = None,
    ) -> PendingSelect:
        query = make_query(
            input_tokens,
            roi,
            entry_id=entry_id,
            match=match,
            min_matched_tokens=min_matched_tokens,
        )
        targets = check_targets(into)
        return PendingSelect(
            lambda: self._take(query, targets), lambda: self._borrow(query, targets)
        )

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
        if len(entry_id) > MAX_ID_LENGTH:
            raise KeyError(f"no entry has an id of {len(entry_id)} characters")
        with LoggedWait(f"taken({entry_id})", "the entry's end", "its consumer"):
            await ask(self._peer, Taken(entry_id), deadline_s=None)

    async def withdraw(self, entry_id: str) -> bool:
        self._peer.check()
        if len(entry_id) > MAX_ID_LENGTH:
            return False
        return bool((await ask(self._peer, Withdraw(entry_id))).value)

    @asynccontextmanager
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
        check_names(specs)
        draft = make_draft(
            input_tokens,
            roi,
            dict(specs),
            entry_id=entry_id,
            fingerprint=None,
            ttl_s=ttl_s,
            deliveries=deliveries,
            streaming=True,
        )
        writer = RemoteWriter(await self._peer.link(), draft, self._peer.pool)
        try:
            with self._waiting_for_room("open_insert", draft):
                await writer.granted()
            yield writer
            writer.check_whole()
            await writer.commit()
        except BaseException:
            writer.cancel()
            raise

    @asynccontextmanager
    async def open_drop_select(
        self,
        input_tokens: TokenIds | None = None,
        roi: TokenIds | None = None,
        *,
        entry_id: str | None = None,
        match: Match = "prefix",
        min_matched_tokens: int = 1,
        into: Mapping[str, torch.Tensor] | None = None,
    ) -> AsyncIterator[SelectStream]:
        query = make_query(
            input_tokens,
            roi,
            entry_id=entry_id,
            match=match,
            min_matched_tokens=min_matched_tokens,
        )
        targets = check_targets(into)
        selecting, delivery = await self._select(query, targets, streams=True)
        stream = RemoteStream(selecting, delivery)
        try:
            selecting.reach(delivery)
            yield stream
        except Exception:
            selecting.give_back(delivery, reached=True)
            await selecting.quiesce()
            raise
        except BaseException:
            selecting.give_back(delivery, reached=False)
            await selecting.quiesce()
            raise
        stream.close()
        await self._acknowledge(selecting, delivery)

    def statistics(self) -> RemoteStatistics:
        return RemoteStatistics(
            selecting=self._selecting,
            inserting=self._inserting,
            received_bytes=self._peer.budget.used_bytes,
            max_bytes=self._peer.budget.max_bytes,
            is_connected=self._peer.is_connected,
        )

    async def aclose(self) -> None:
        """Close the peer, which is this buffer's only way."""
        await self._peer.aclose()

    def abort(self) -> None:
        """Abort the peer."""
        self._peer.abort()

    async def _insert(
        self,
        draft: Draft,
        tensors: list[torch.Tensor],
        digests: list[bytes] | None,
    ) -> None:
        while True:
            link = await self._peer.link()
            inserting = Inserting(link, draft, tensors, digests)
            try:
                with self._waiting_for_room("insert", draft):
                    await inserting.accepted()
                return
            except PeerLost:
                if link.is_open:
                    raise  # the peer says so, of something else
                await inserting.quiesce()
                await self._check_same(link.peer.incarnation, inserting.was_granted)
                if digests is None:
                    digests = await self._peer.pool.digest(tensors)
            except BaseException:
                inserting.cancel()
                await inserting.quiesce()
                raise

    async def _take(self, query: Query, targets: Mapping[str, torch.Tensor]) -> KVEntry:
        while True:
            selecting, delivery = await self._select(query, targets, streams=False)
            if delivery.is_small:
                selecting.settle_at_once(delivery)
                return delivery.entry()
            try:
                await selecting.settle(delivery)
            except PeerLost:
                if not await self._was_acknowledged(selecting, delivery):
                    continue
            except LeaseLost:
                selecting.cancel()
                continue
            except BaseException:
                selecting.cancel()
                raise
            selecting.release()
            return delivery.entry()

    @asynccontextmanager
    async def _borrow(
        self, query: Query, targets: Mapping[str, torch.Tensor]
    ) -> AsyncIterator[KVEntry]:
        selecting, delivery = await self._select(query, targets, streams=False)
        try:
            entry = delivery.entry()
            selecting.release()
            selecting.reach(delivery)
            yield entry
        except Exception:
            selecting.give_back(delivery, reached=True)
            raise
        except BaseException:
            selecting.give_back(delivery, reached=False)
            raise
        await self._acknowledge(selecting, delivery)

    async def _select(
        self, query: Query, targets: Mapping[str, torch.Tensor], *, streams: bool
    ) -> tuple[Selecting, Delivery]:
        """Select, on one link after the other while links are cut."""
        while True:
            link = await self._peer.link()
            selecting = Selecting(
                link, query, targets, self._peer.budget, streams=streams
            )
            self._selecting += 1
            tokens = "any" if query.key is None else len(query.key) // TOKEN_NBYTES
            wait = self._waits.begin(tokens)
            try:
                come = selecting.offered() if streams else selecting.whole()
                return selecting, await come
            except PeerLost:
                if link.is_open:
                    raise  # the peer says so, of something else
                selecting.release()
                await selecting.quiesce()
            except EntryAborted:  # before anything of it was handed out
                selecting.close()
                await selecting.quiesce()
            except BaseException:
                selecting.cancel()
                await selecting.quiesce()
                raise
            finally:
                self._selecting -= 1
                self._waits.end(wait)

    def _waiting_for_room(self, call: str, draft: Draft) -> LoggedWait:
        return LoggedWait(
            f"{call} of {draft.entry_id} ({sum(draft.sizes)} bytes)",
            f"room in the buffer at {self._peer.url}",
            "a drop_select or a withdraw there",
        )

    async def _acknowledge(self, selecting: Selecting, delivery: Delivery) -> None:
        try:
            await selecting.acknowledge(delivery)
        except PeerLost as exc:
            raise LeaseLost(
                f"the link was lost before entry {delivery.offer.entry_id!r} was "
                "acknowledged; it was given back",
            ) from exc
        except EntryAborted as exc:
            raise LeaseLost(
                f"entry {delivery.offer.entry_id!r} left before it was acknowledged"
            ) from exc
        finally:
            selecting.close()
            await selecting.quiesce()

    async def _was_acknowledged(self, selecting: Selecting, delivery: Delivery) -> bool:
        """The link was cut around the acknowledgement: ask on the next one."""
        selecting.release()
        await selecting.quiesce()
        if not selecting.acknowledged:
            return False
        await self._check_same(selecting.incarnation, held=True)
        settle = Settle(delivery.offer.entry_id, delivery.offer.token)
        return bool((await ask(self._peer, settle)).value)

    async def _check_same(self, incarnation: str, held: bool) -> None:
        """Wait for a new link.

        :raises PeerRestarted: the peer has lost what it held for this call
        """
        link = await self._peer.link()
        if held and link.peer.incarnation != incarnation:
            raise PeerRestarted(
                f"{self._peer.url} came back without its memory",
                hint="what was under way is gone; make the call again",
            )


@dataclasses.dataclass(frozen=True)
class RemoteStatistics:
    """This side of a remote buffer. ``received_bytes`` wait to be handed over."""

    selecting: int
    inserting: int
    received_bytes: int
    max_bytes: int
    is_connected: bool
