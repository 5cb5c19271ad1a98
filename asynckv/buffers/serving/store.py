"""A store buffer's answers to one peer: values wanted, stored, and kept for a while."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

from asynckv.abc import StoredValue
from asynckv.buffers.lower_tiers import Owner, TenantModel
from asynckv.buffers.serving.insert import answer
from asynckv.buffers.serving.service import (
    BUSY_BYTES,
    REQUEST_NBYTES,
    LinkBytes,
    Service,
    answer_at_once,
)
from asynckv.buffers.values import PendingPut, PinnedValue, StoredValues
from asynckv.errors import BufferClosed, ChecksumError, PeerLost, RemoteProtocolError
from asynckv.links.link import Link, LinkStream
from asynckv.links.streams import StreamHandler
from asynckv.protocol.failures import to_failure
from asynckv.protocol.frames import (
    Cancel,
    Cancelled,
    Clear,
    Contains,
    Delete,
    Frame,
    Get,
    Nack,
    Offer,
    OpeningFrame,
    Pin,
    Pinned,
    Put,
    Result,
    Stat,
    Took,
)
from asynckv.protocol.transfer_frames import Grant
from asynckv.protocol.values import Facts
from asynckv.protocol.wire import digest_of
from asynckv.tensors.runs import fill, joined
from asynckv.tensors.views import dtype_of
from asynckv.transfers.incoming import Incoming, receive_frame
from asynckv.transfers.manifest import INLINE_NBYTES, layout_of, pack
from asynckv.transfers.outgoing import Outgoing
from asynckv.transfers.source import RegionSource
from asynckv.transfers.targets import HostTarget
from asynckv.waits.waiting import Watchers

__all__ = (
    "ServedFromTiers",
    "ServedGet",
    "ServedPin",
    "ServedPut",
    "StoreService",
)


_HELD_AT_ONCE = 64


class ServedGet:
    """One remote get: read from the store's memory, which stays pinned meanwhile."""

    def __init__(
        self, service: StoreService, stream: LinkStream, pinned: PinnedValue
    ) -> None:
        self._service = service
        self._stream = stream
        self._pinned = pinned
        self._outgoing: Outgoing | None = None
        service.under_way.add(self)
        self._offer_when_writable()

    def on_frame(self, frame: Frame, body: bytes) -> None:
        match frame:
            case Grant() if self._outgoing is not None:
                self._outgoing.on_grant(frame)
            case Took():
                self._end(None)
            case Cancel() | Nack():
                self._end(Cancelled())
            case _:
                raise RemoteProtocolError(f"no {type(frame).__name__} belongs here")

    def on_lost(self, error: PeerLost) -> None:
        self._end(None)

    def _offer_when_writable(self) -> None:
        service, pinned = self._service, self._pinned
        if self not in service.under_way:
            return
        if service.link.outgoing_bytes > BUSY_BYTES:
            service.link.call_when_drained(self._offer_when_writable)
            return
        transfer, stream = service.link.new_transfer(), self._stream
        layout = layout_of({"value": pinned.spec})
        source = RegionSource(pinned.region, pinned.spec, pinned.digest)
        inline = source.nbytes <= INLINE_NBYTES
        pieces = [joined(source.host())] if inline else []
        body = pack(layout, [pinned.digest], None, None, pieces)
        stream.send(Offer(transfer, inline), body)
        if inline:
            self._end(Result(1))
        else:
            self._outgoing = Outgoing(
                stream, transfer, failed=lambda exc: self._end(to_failure(exc))
            )
            self._outgoing.add(0, source)

    def _end(self, last: Frame | None) -> None:
        if self._outgoing is not None:
            self._outgoing.stop()
        if last is not None:
            self._stream.send(last)
        self._stream.close()
        self._service.values.release(self._pinned)
        self._service.kept.queries.give(REQUEST_NBYTES)
        self._service.ended(self)


class ServedPin:
    """One peer's hold on some values, until it lets go or is lost.

    ``pinned`` is its from here on. It keeps no server from leaving: what is pinned is
    no request under way.
    """

    def __init__(
        self,
        service: StoreService,
        stream: LinkStream,
        keys: Sequence[str],
        pinned: Sequence[PinnedValue | None],
    ) -> None:
        self._service = service
        self._stream = stream
        self._charged = _nbytes_of(keys)
        self._pinned = pinned
        try:
            service.kept.queries.take(self._charged)
        except BaseException:
            service.values.release_all(pinned)
            raise
        stream.send(Pinned(tuple([one is not None for one in pinned])))

    def on_frame(self, frame: Frame, body: bytes) -> None:
        if not isinstance(frame, Cancel):
            raise RemoteProtocolError(f"no {type(frame).__name__} belongs here")
        self._end()
        self._stream.send(Cancelled())
        self._stream.close()

    def on_lost(self, error: PeerLost) -> None:
        self._end()
        self._stream.close()

    def _end(self) -> None:
        self._service.values.release_all(self._pinned)
        self._pinned = ()
        self._service.kept.queries.give(self._charged)
        self._charged = 0


class ServedFromTiers:
    """A request for values that are not all in memory: they are fetched first.

    ``answer`` is called then, and returns who has the stream from there on, if anybody.
    """

    def __init__(
        self,
        service: StoreService,
        stream: LinkStream,
        keys: Sequence[str],
        answer: Callable[[], Awaitable[StreamHandler]],
    ) -> None:
        self._stream = stream
        self._answer = answer
        self._next: StreamHandler | None = None
        self._task = service.run_kept(
            *(service.kept.queries, _nbytes_of(keys)),
            *(self._run, "values from lower tiers"),
        )
        service.under_way.add(self._task)
        self._task.add_done_callback(service.ended)

    def on_frame(self, frame: Frame, body: bytes) -> None:
        if self._next is not None:
            self._next.on_frame(frame, body)
        elif isinstance(frame, Cancel):
            self._task.cancel()
            self._stream.send(Cancelled())
            self._stream.close()
        else:
            raise RemoteProtocolError(f"no {type(frame).__name__} belongs here")

    def on_lost(self, error: PeerLost) -> None:
        self._task.cancel()
        if self._next is not None:
            self._next.on_lost(error)

    async def _run(self) -> None:
        try:
            self._next = await self._answer()
        except Exception as exc:  # noqa: BLE001 - whoever asked is told
            self._stream.send(to_failure(exc))
            self._stream.close()


class ServedPut:
    """One remote put: received straight into the store's memory."""

    def __init__(
        self, service: StoreService, stream: LinkStream, frame: Put, body: bytes
    ) -> None:
        if frame.spec is None or frame.inline != (frame.spec.nbytes == len(body)):
            raise RemoteProtocolError("a put's body is not the tensor it declares")
        try:
            dtype_of(frame.spec.dtype)
        except ValueError as exc:
            raise RemoteProtocolError(str(exc)) from exc
        self._service = service
        self._stream = stream
        self._frame = frame
        self._spec = frame.spec
        # What rode along in vain is asked for by payload once there is room: also more
        # than may ride along, which is too much to be looked at on the loop.
        rides = frame.inline and len(body) <= INLINE_NBYTES
        fits = rides and service.kept.inserts.fits(REQUEST_NBYTES + len(body))
        self._inline = body if fits else None
        nbytes = REQUEST_NBYTES + (len(body) if fits else 0)
        service.link.payload.announce(frame.transfer)
        self._incoming: Incoming | None = None
        self._digest = b""
        self._task = service.run_put(self._run, frame.key, nbytes)
        self._task.add_done_callback(partial(answer, stream))

    def on_frame(self, frame: Frame, body: bytes) -> None:
        if isinstance(frame, Cancel):
            self._task.cancel()
        else:
            receive_frame(self._incoming, frame, body)

    def on_lost(self, error: PeerLost) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        values, frame = self._service.values, self._frame
        expires_at_s = time.time() + frame.ttl_s if frame.ttl_s else None
        pending = await values.reserve(frame.key, self._spec, self._service.owner)
        try:
            values.commit(
                *(pending, await self._fill(pending)),
                expires_at_s=expires_at_s,
                is_pinned=frame.pin,
            )
        finally:
            values.discard(pending)

    async def _fill(self, pending: PendingPut) -> bytes:
        if self._inline is not None:
            return self._take_inline(self._inline, pending)
        self._incoming = Incoming(
            *(self._stream, self._frame.transfer),
            targets=[HostTarget(pending.region.memory())],
            landed=self._landed,
        )
        await self._incoming.receive()
        return self._digest

    def _take_inline(self, body: bytes, pending: PendingPut) -> bytes:
        digest = digest_of(body)
        if self._frame.digest and self._frame.digest != digest:
            raise ChecksumError(f"{self._frame.key!r} changed on its way")
        fill(pending.region.memory(), memoryview(body))
        return digest

    def _landed(self, index: int, digest: bytes) -> None:
        self._digest = digest


class StoreService(Service):
    """Answers the requests that one link makes of ``values``, those of its owner.

    ``kept`` is charged for what they keep while they are open. A link of a ``tenant``
    sees that one's values, any other those of no tenant.
    """

    def __init__(
        self, values: StoredValues, link: Link, kept: LinkBytes, tenant: str = ""
    ) -> None:
        super().__init__(link)
        self.values = values
        self.owner: Owner = link.fingerprint
        if tenant:
            self.owner = TenantModel(tenant, link.fingerprint)
        self.kept = kept
        self.under_way: set[object] = set()
        self._watchers = Watchers()

    def open(
        self, stream: LinkStream, frame: OpeningFrame, body: bytes
    ) -> StreamHandler | None:
        """Answer a request; ``None`` if it is none of a store buffer's."""
        owner = self.owner
        if not isinstance(frame, Put | Get | Delete | Clear | Contains | Pin | Stat):
            return None
        if self.is_draining:
            raise BufferClosed("the server is leaving; it takes no new requests")
        if isinstance(frame, Clear):
            return answer_at_once(stream, Result(self.values.clear(owner)))
        if isinstance(frame, Put):
            if frame.spec is not None:
                return ServedPut(self, stream, frame, body)
            frame = Delete(frame.key)
        keys = frame.keys if isinstance(frame, Contains | Pin) else (frame.key,)
        # Of many keys: others have their turn in between.
        is_far = isinstance(frame, Pin) and len(keys) > _HELD_AT_ONCE
        if not is_far and self.values.lower is not None:
            is_far = not all(self.values.has(keys, owner))
        if not (is_far or isinstance(frame, Stat)):
            return self._answer(stream, frame)
        return ServedFromTiers(
            self, stream, keys, partial(self._fetch, stream, frame, keys)
        )

    def _answer(
        self, stream: LinkStream, frame: Get | Pin | Contains | Delete
    ) -> StreamHandler:
        """Answer by what is in memory."""
        match frame:
            case Delete(key=key):
                was_there = self.values.remove(key, self.owner)
                return answer_at_once(stream, Result(int(was_there)))
            case Get(key=key):
                pinned = self._lookup(key)
                if pinned is None:
                    return answer_at_once(stream, Result(0))
                return ServedGet(self, stream, pinned)
            case Pin():
                held = self.values.hold(frame.keys, self.owner, is_prefix=frame.prefix)
                return ServedPin(self, stream, frame.keys, held)
            case _:
                flags = self.values.has(frame.keys, self.owner)
                return answer_at_once(stream, Result(sum(flags), flags))

    async def _fetch(
        self,
        stream: LinkStream,
        frame: Get | Pin | Contains | Delete | Stat,
        keys: Sequence[str],
    ) -> StreamHandler:
        """Answer by what lower tiers have, too."""
        owner = self.owner
        match frame:
            case Delete(key=key):
                was_there = await self.values.delete(key, owner)
                return answer_at_once(stream, Result(int(was_there)))
            case Stat(key=key):
                told = _result_of(await self.values.stat(key, owner))
                return answer_at_once(stream, told)
            case Contains():
                nearest = await self.values.nearest(keys, owner)
                return answer_at_once(stream, _nearest(nearest))
            case Pin(within_s=within_s, prefix=prefix):
                pinned = await self.values.fetch_and_hold(
                    keys, owner, within_s=within_s, is_prefix=prefix
                )
                return ServedPin(self, stream, keys, pinned)
        await self.values.fetch(keys, owner)
        return self._answer(stream, frame)

    def run_put(
        self, run: Callable[[], Coroutine[Any, Any, None]], key: str, nbytes: int
    ) -> asyncio.Task[None]:
        """Own the task of one put, which keeps so many bytes until it ends.

        :raises Overloaded: they cannot be kept; nothing was begun
        """
        task = self.run_kept(self.kept.inserts, nbytes, run, f"put of {key}")
        self.under_way.add(task)
        task.add_done_callback(self.ended)
        return task

    def ended(self, request: object) -> None:
        """One request is over."""
        self.under_way.discard(request)
        if not self.under_way:
            self._watchers.wake()

    async def wait_idle(self) -> None:
        while self.under_way:
            await self._watchers.next_change(self.loop)

    def _lookup(self, key: str) -> PinnedValue | None:
        """Return what is stored as ``key``, and charge for it if something is."""
        pinned = None
        self.kept.queries.take(REQUEST_NBYTES)
        try:
            pinned = self.values.lookup(key, self.owner)
        finally:
            if pinned is None:
                self.kept.queries.give(REQUEST_NBYTES)
        return pinned


def _nbytes_of(keys: Sequence[str]) -> int:
    """Return what a request for so many values keeps here."""
    return REQUEST_NBYTES + len("".join(keys).encode())


_NOWHERE: Final = 255


def _nearest(nearest: Sequence[str | None]) -> Result:
    """Say where each of several keys is."""
    tiers = tuple(tier for tier in dict.fromkeys(nearest) if tier is not None)
    number_of: dict[str | None, int] = {
        tier: number for number, tier in enumerate(tiers)
    }
    numbers = bytes([number_of.get(tier, _NOWHERE) for tier in nearest])
    flags = tuple([number != _NOWHERE for number in numbers])
    return Result(sum(flags), flags, tiers=tiers, nearest=numbers)


def _result_of(stored: StoredValue | None) -> Result:
    if stored is None:
        return Result(0)
    facts = None
    if stored.spec is not None:
        facts = Facts(stored.spec, stored.ttl_s or 0.0, stored.is_pinned)
    return Result(1, tiers=stored.tiers, facts=facts)
