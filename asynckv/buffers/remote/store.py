"""A store buffer at the other end of a link, with the same face as a local one."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Final

import torch

from asynckv.abc import (
    KVStoreBuffer,
    KVStoreStatistics,
    PrefixMatch,
    StoredValue,
)
from asynckv.abc.closing import async_with_only
from asynckv.buffers.remote.connection import ANSWER_S, PeerBuffer, PeerConnection, ask
from asynckv.buffers.remote.insert import RemoteSend
from asynckv.buffers.store import check_place, check_value, expiry_of
from asynckv.errors import LeaseLost, PeerLost, RemoteProtocolError
from asynckv.links.link import Link
from asynckv.observability.waits import LoggedWait
from asynckv.protocol.failures import fail_by
from asynckv.protocol.frames import (
    Cancel,
    Cancelled,
    Clear,
    Contains,
    Delete,
    Frame,
    Get,
    Offer,
    Pin,
    Pinned,
    Put,
    Result,
    Stat,
    Took,
)
from asynckv.protocol.transfer_frames import Eager, Sent
from asynckv.protocol.wire import digest_of
from asynckv.tensors.blocks import KVMemory
from asynckv.tensors.runs import joined
from asynckv.tensors.views import check_into
from asynckv.transfers.delivery import Delivery, move_to_device
from asynckv.transfers.manifest import INLINE_NBYTES
from asynckv.transfers.offers import OfferReceiver, read_offer
from asynckv.transfers.routes import PeerRoutes
from asynckv.transfers.source import Source, source_of, until_made
from asynckv.transfers.tokens import as_key, as_keys
from asynckv.types import as_flag, as_seconds
from asynckv.waits.waiting import PlainTaskGroup, Reply

__all__ = (
    "RemoteGet",
    "RemotePin",
    "RemoteStoreBuffer",
    "RemoteStoreStatistics",
    "begin_put",
)


class RemoteGet:
    """One value on its way here, on one link. Given up, it needs :meth:`cancel`.

    It lands where ``routes`` receive.
    """

    def __init__(
        self,
        link: Link,
        key: str,
        into: torch.Tensor | None,
        routes: PeerRoutes,
    ) -> None:
        self._key = key
        self._link = link
        self._into = into
        self._routes = routes
        self._delivery: Delivery | None = None
        self._receiver: OfferReceiver | None = None
        self._offer: Reply[Delivery | None] = Reply()
        self._landed: Reply[None] = Reply()
        self._stream = link.open_stream(self, Get(key))

    async def value(self) -> torch.Tensor | None:
        """Return the tensor, verified, or ``None``.

        :raises Exception: what the peer says, or ``PeerLost``
        """
        self._routes.budget.small.prepare()
        delivery = await self._offer
        if delivery is None:
            return None
        ((name, spec),) = delivery.manifest.layout.specs.items()
        targets: dict[str, KVMemory] = {}
        if self._into is not None:
            check_into(self._into, spec, self._key)
            targets = {name: self._into}
        if delivery.offer.inline:
            delivery.read_inline(targets)
            await move_to_device(delivery, targets, self._routes.pool)
        else:
            await self._receive(delivery, targets)
            self._stream.send(Took(b""))
        return delivery.tensors[name]

    def release(self) -> None:
        """The tensor is the application's now, or nobody's. Never waits."""
        if self._delivery is not None:
            self._delivery.uncharge(self._routes.budget)
            self._delivery.forget()

    def cancel(self) -> None:
        """The value is not wanted any more. Never waits."""
        self._stream.send(Cancel())
        if self._delivery is not None and self._delivery.incoming is not None:
            self._delivery.incoming.stop()

    async def quiesce(self) -> None:
        """Wait until nothing touches memory that the caller lent (at most 1 s)."""
        if self._receiver is not None:
            await self._receiver.quiesce()

    def on_frame(self, frame: Frame, body: bytes) -> None:
        match frame:
            case Offer():
                self._on_offer(frame, body)
            case Sent() | Eager():
                incoming = None if self._delivery is None else self._delivery.incoming
                if incoming is not None:  # else nothing was granted
                    incoming.on_frame(frame, body)
            case Result():
                # Nothing follows it: who waits for what was offered would wait on.
                if self._delivery is not None and not self._delivery.offer.inline:
                    raise RemoteProtocolError("a Result before the value has come")
                self._offer.give(None)
            case _:
                fail_by(frame, "get", self._fail)

    def on_lost(self, error: PeerLost) -> None:
        self._fail(error)

    def _on_offer(self, offer: Offer, body: bytes) -> None:
        delivery = read_offer(self._link, offer, body, None)
        delivery.tensor_from = self._routes.budget.small.tensor
        if len(delivery.manifest.digests) != 1:
            delivery.release()  # the error would keep it
            raise RemoteProtocolError("a value is one tensor")
        if not self._offer.is_in:  # else nobody wants it: let it go
            self._delivery = delivery
            self._offer.give(delivery)

    async def _receive(self, delivery: Delivery, targets: dict[str, KVMemory]) -> None:
        """Let the value land, verified: in ``targets``, or in memory of its own."""
        self._receiver = OfferReceiver(self._stream, targets, self._routes)
        landed = partial(self._landed.give, None)
        await self._receiver.accept(delivery, landed, self._landed.fail, self._stands)
        await self._landed

    def _stands(self) -> bool:
        return not self._landed.is_in

    def _fail(self, error: Exception) -> None:
        self._offer.fail(error)
        self._landed.fail(error)


class RemotePin:
    """Values that are kept at the other end of one link."""

    def __init__(
        self, link: Link, keys: tuple[str, ...], within_s: float, *, prefix: bool
    ) -> None:
        self.found: Reply[tuple[bool, ...]] = Reply()
        self._is_over = False
        self._lost: PeerLost | None = None
        self._stream = link.open_stream(self, Pin(keys, within_s, prefix))

    def on_frame(self, frame: Frame, body: bytes) -> None:
        match frame:
            case Pinned():
                self.found.give(frame.flags)
            case Cancelled() if self._is_over:
                pass
            case _:
                fail_by(frame, "pin", self.found.fail)

    def on_lost(self, error: PeerLost) -> None:
        self._lost = error
        self.found.fail(error)

    def release(self) -> None:
        """The values may be dropped again. Never waits; again is nothing."""
        if not self._is_over and self._lost is None:
            self._stream.send(Cancel())
        self._is_over = True

    def check(self) -> None:
        """:raises LeaseLost: the link was lost, and the hold with it"""
        if self._lost is not None:
            raise LeaseLost("the link was lost, and what was pinned with it")


def begin_put(
    link: Link,
    key: str,
    source: Source,
    routes: PeerRoutes | None = None,
    *,
    ttl_s: float | None = None,
    pin: bool = False,
) -> RemoteSend:
    """Ask for a value to be stored. ``source`` is dense; if it is read on a GPU, its
    bytes are too many to leave with the request. Never waits.
    """
    inline = source.nbytes <= INLINE_NBYTES
    view = joined(source.host()) if inline else memoryview(b"")
    frame = Put(
        key=key,
        transfer=link.new_transfer(),
        inline=inline,
        spec=source.spec,
        digest=digest_of(view) if inline and link.digest != "off" else b"",
        ttl_s=ttl_s or 0.0,
        pin=pin,
    )
    return RemoteSend(link, frame, view, [source], routes)


_BATCH_KEYS: Final = 4096
_BATCH_NBYTES: Final = 32 * 1024


@dataclasses.dataclass(frozen=True)
class RemoteStoreStatistics(KVStoreStatistics):
    """This side of a store buffer at a peer."""

    getting: int
    is_connected: bool


class RemoteStoreBuffer(PeerBuffer, KVStoreBuffer):
    """The store buffer that a peer serves. It is closed with its peer."""

    def __init__(self, peer: PeerConnection) -> None:
        super().__init__(peer)
        self._getting = 0
        self._putting = 0
        self._hits = 0
        self._misses = 0

    async def put(
        self,
        key: str,
        value: torch.Tensor | None,
        *,
        ttl_s: float | None = None,
        pin: bool = False,
    ) -> None:
        self._peer.check()
        until_s, pin = expiry_of(ttl_s), as_flag(pin, "pin")
        key = as_key(key)
        if value is None:
            await self.delete(key)
            return
        check_value(value)
        pool, nbytes = self._peer.pool, value.nbytes
        source = await source_of(pool.catch(value), pool, None, nbytes)
        self._putting += 1
        try:
            await until_made([source], pool)
            await self._put(key, source, until_s, pin=pin)
        finally:
            self._putting -= 1

    async def get(
        self, key: str, into: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        self._peer.check()
        key = as_key(key)
        if into is not None:
            check_place(into)
        self._getting += 1
        try:
            value = await self._get(key, into)
        finally:
            self._getting -= 1
        self._hits += value is not None
        self._misses += value is None
        return value

    async def delete(self, key: str) -> bool:
        self._peer.check()
        key = as_key(key)
        return bool((await ask(self._peer, Delete(key))).value)

    async def clear(self) -> int:
        self._peer.check()
        return (await ask(self._peer, Clear())).value

    async def contains(self, keys: Sequence[str]) -> tuple[bool, ...]:
        self._peer.check()
        answers = await self._ask_of(as_keys(keys))
        return tuple(flag for answer in answers for flag in answer.flags)

    async def match_prefix(self, block_keys: Sequence[str]) -> PrefixMatch:
        self._peer.check()
        nearest: list[str | None] = []
        for answer in await self._ask_of(as_keys(block_keys)):
            nearest += _nearest_of(answer)
        return PrefixMatch(nearest)

    async def stat(self, key: str) -> StoredValue | None:
        self._peer.check()
        answer = await ask(self._peer, Stat(as_key(key)))
        if not answer.tiers:
            return None
        if answer.facts is None:
            return StoredValue(answer.tiers)
        facts = answer.facts
        ttl_s = facts.ttl_s or None
        return StoredValue(answer.tiers, facts.spec, ttl_s, facts.is_pinned)

    @async_with_only("pin(...) as found")
    async def pin(
        self,
        keys: Sequence[str],
        *,
        within_s: float | None = None,
        prefix: bool = False,
    ) -> AsyncIterator[tuple[bool, ...]]:
        self._peer.check()
        prefix, within_s = as_flag(prefix, "prefix"), as_seconds(within_s, "within_s")
        keys = as_keys(keys)
        within_s = ANSWER_S if within_s is None else within_s
        link = await self._peer.link()
        held: list[RemotePin] = []
        try:
            held.extend(
                RemotePin(link, some, within_s, prefix=prefix)
                for some in _batches(keys)
            )
            found: list[bool] = []
            async with asyncio.timeout(ANSWER_S + within_s):
                for one in held:
                    if prefix and not all(found):
                        one.release()
                    else:
                        found += await one.found
            yield (*found, *[False] * (len(keys) - len(found)))
        finally:
            for one in held:
                one.release()
        for one in held:
            one.check()

    def statistics(self) -> RemoteStoreStatistics:
        return RemoteStoreStatistics(
            max_bytes=self._peer.budget.max_bytes,
            used_bytes=self._peer.budget.used_bytes,
            waiting_puts=self._putting,
            hits=self._hits,
            misses=self._misses,
            getting=self._getting,
            is_connected=self._peer.is_connected,
        )

    async def _ask_of(self, keys: tuple[str, ...]) -> list[Result]:
        """Ask which of ``keys`` are there, in one round trip."""
        async with PlainTaskGroup() as group:
            asking = [
                group.create_task(ask(self._peer, Contains(some)))
                for some in _batches(keys)
            ]
        return [one.result() for one in asking]

    async def _put(
        self, key: str, source: Source, until_s: float | None, *, pin: bool
    ) -> None:
        """A put that was cut off is made again: the last one counts."""
        who = f"put of {key!r} ({source.nbytes} bytes)"
        room = f"room in the store at {self._peer.url}"
        incarnation = ""
        while True:
            link = await self._peer.link(incarnation)
            incarnation = link.peer.incarnation
            with LoggedWait(who, room, "the end of a get or put there"):
                ttl_s = None if until_s is None else max(until_s - time.time(), 1e-3)
                sending = begin_put(
                    *(link, key, source, self._peer.routes), ttl_s=ttl_s, pin=pin
                )
                if await sending.accepted():
                    return

    async def _get(self, key: str, into: torch.Tensor | None) -> torch.Tensor | None:
        while True:
            link = await self._peer.link()
            getting = RemoteGet(link, key, into, self._peer.routes)
            try:
                return await getting.value()
            except PeerLost:
                await getting.quiesce()
                if link.is_open:
                    raise  # the peer says so, of something else
            except BaseException:
                getting.cancel()
                await getting.quiesce()
                raise
            finally:
                getting.release()


def _nearest_of(answer: Result) -> list[str | None]:
    """Return for each key that was asked for where it is, or ``None``."""
    if not answer.nearest:
        return ["memory" if flag else None for flag in answer.flags]
    tiers = dict(enumerate(answer.tiers))
    return [tiers.get(number) for number in answer.nearest]


def _is_small(keys: Sequence[str]) -> bool:
    nbytes = len("".join(keys).encode()) + 5 * len(keys)
    return 0 < len(keys) <= _BATCH_KEYS and nbytes <= _BATCH_NBYTES


def _batches(keys: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield ``keys`` in as many at a time as fit in one frame."""
    if _is_small(keys):
        yield tuple(keys)
        return
    some: list[str] = []
    nbytes = 0
    for key in keys:
        size = len(key.encode()) + 5
        if nbytes + size > _BATCH_NBYTES or len(some) == _BATCH_KEYS:
            yield tuple(some)
            some, nbytes = [], 0
        some.append(key)
        nbytes += size
    if some:
        yield tuple(some)
