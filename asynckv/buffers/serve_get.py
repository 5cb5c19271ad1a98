"""A store buffer's answer to a peer that wants a value."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from asynckv.buffers.gpu_sending import GpuSending
from asynckv.buffers.hoisting import HostCopy
from asynckv.buffers.manifest import INLINE_NBYTES, pack
from asynckv.buffers.serve_mapped import map_value
from asynckv.buffers.store_ledger import PinnedValue
from asynckv.buffers.waiting_bytes import REQUEST_NBYTES
from asynckv.errors import PeerLost, RemoteProtocolError
from asynckv.links.requests import LinkStream
from asynckv.links.riding import RidingParts, rides
from asynckv.protocol.device_frames import GrantDevices
from asynckv.protocol.failures import to_failure
from asynckv.protocol.frames import (
    Cancel,
    Cancelled,
    Frame,
    Nack,
    Offer,
    Result,
    Took,
)
from asynckv.protocol.payload_frames import Done, Grant
from asynckv.protocol.values import TensorRecord
from asynckv.tensors.arena import Region
from asynckv.tensors.feeds import Feed
from asynckv.tensors.runs import Memory, joined
from asynckv.types import TensorSpec

if TYPE_CHECKING:
    from asynckv.buffers.serve_store import StoreService

__all__ = ("ServedGet",)

_BUSY_BYTES = 4 * 2**20
"""With so much unwritten for a peer, the next value waits its turn."""


class ServedGet:
    """One remote get: read from the store's memory, which stays pinned meanwhile.

    On a GPU the peer reads it there, or it goes from GPU to GPU; or a copy is sent.
    """

    def __init__(
        self, service: StoreService, stream: LinkStream, pinned: PinnedValue
    ) -> None:
        self._service = service
        self._stream = stream
        self._pinned = pinned
        self._transfer = service.link.new_transfer()
        self._is_offered = self._is_sending = self._is_shown = False
        self._by_gpu: GpuSending | None = None
        self._copying: asyncio.Task[None] | None = None
        self._riding: RidingParts | None = None
        service.under_way.add(self)
        self._offer_when_writable()

    def on_frame(self, frame: Frame, body: bytes) -> None:
        is_wanted = self._is_offered and not (self._is_sending or self._is_shown)
        match frame:
            case Grant() if is_wanted:
                self._send()
            case GrantDevices() if is_wanted:
                self._send_by_gpu(frame)
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
        if service.link.outgoing_bytes > _BUSY_BYTES:
            service.link.call_when_drained(self._offer_when_writable)
            return
        self._is_offered = True
        region, holder = pinned.region, service.showing.holder
        record = TensorRecord("value", pinned.spec, pinned.digest)
        inline = pinned.spec.nbytes <= INLINE_NBYTES and not region.is_on_device
        pieces = [joined(region.memory())] if inline else []
        body = pack([record], None, None, pieces)
        mapped = None
        if (shown := map_value(region, holder)) is not None:
            # From here on the peer's connection keeps it there, whatever comes.
            self._is_shown = True
            mapped, places = shown
            body += places
        self._stream.send(Offer(self._transfer, inline, mapped=mapped), body)
        if inline:
            self._end(Result(1))

    def _send(self) -> None:
        self._is_sending = True
        region = self._pinned.region
        if region.is_on_device:
            hoist = self._service.hoisting.hoist
            spec, sent, failed = self._pinned.spec, self._send_copy, self._fail
            hoisting = partial(hoist, region, spec, sent, failed)
            self._copying = self._service.run(hoisting, "copy from a GPU", 0)
        else:
            self._send_bytes(region.memory())

    def _send_copy(self, copy: HostCopy) -> None:
        if isinstance(copy, Feed):
            feed, digest = self._service.link.payload.feed, self._pinned.digest or None
            feed(self._transfer, 0, copy, self._sent, digest=digest)
        elif rides(copy.nbytes):
            self._riding = RidingParts(self._service.link, self._stream, self._transfer)
            digest = self._pinned.digest or None
            self._riding.add(0, copy.nbytes, lambda: copy, digest)
        else:
            self._send_bytes(copy)

    def _send_bytes(self, memory: Memory) -> None:
        digest = self._pinned.digest or None
        payload = self._service.link.payload
        payload.send(self._transfer, 0, memory, self._sent, digest=digest)

    def _send_by_gpu(self, granted: GrantDevices) -> None:
        way = self._service.devices.way
        if way is None or granted.transfer != self._transfer:
            raise RemoteProtocolError("a grant of memory that nothing leads to")
        if rides(self._pinned.spec.nbytes):
            self._send()
            return
        self._is_sending = True
        self._by_gpu = GpuSending(way, self._stream, granted, self._digest_part)
        pinned = self._pinned
        self._by_gpu.send(0, pinned.region, pinned.spec, pinned.digest)

    def _digest_part(
        self, region: Region, spec: TensorSpec, told: Callable[[bytes], None]
    ) -> asyncio.Task[None]:
        digest = self._service.hoisting.digest
        digesting = partial(digest, region, spec, told, self._fail)
        return self._service.run(digesting, "digest of what came without one", 0)

    def _sent(self, digest: bytes, error: BaseException | None) -> None:
        if error is None:  # or else the link ends
            self._stream.send(Done(self._transfer, 0, digest))

    def _fail(self, error: Exception) -> None:
        self._end(to_failure(error))

    def _end(self, last: Frame | None) -> None:
        if self._is_sending:
            self._service.link.payload.stop(self._transfer)
        if self._by_gpu is not None:
            self._by_gpu.stop()
        if self._copying is not None:
            self._copying.cancel()
        if self._riding is not None:
            self._riding.stop()
        if last is not None:
            self._stream.send(last)
        self._stream.close()
        self._service.buffer.release(self._pinned)
        self._service.kept.queries.give(REQUEST_NBYTES)
        self._service.ended(self)
