"""One delivery on its way to a peer: the offer, then the parts that do not ride along.

Plain functions; nothing here waits or knows how a delivery ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias

import msgspec

from asynckv.buffers.entries import Lease, StoredEntry
from asynckv.buffers.gpu_sending import DigestPart, GpuSending
from asynckv.buffers.manifest import check_body
from asynckv.buffers.serve_mapped import can_be_mapped, map_entry
from asynckv.errors import RemoteProtocolError
from asynckv.links.gpu_link import GpuLink
from asynckv.links.link import Link
from asynckv.links.requests import LinkStream
from asynckv.links.riding import RidingParts, rides
from asynckv.links.sharing import MapHolder, Pin
from asynckv.protocol.device_frames import GrantDevices
from asynckv.protocol.frames import (
    Complete,
    Offer,
    Retract,
)
from asynckv.protocol.payload_frames import Done
from asynckv.tensors.arena import Region
from asynckv.tensors.runs import Memory, joined
from asynckv.tensors.slab_regions import SlabRegion
from asynckv.types import TensorSpec

__all__ = ("Hoist", "Offering", "make_offer", "may_begin", "release")

Hoist: TypeAlias = Callable[
    [Region, TensorSpec, Callable[[memoryview], None]], "asyncio.Task[None]"
]
"""Copies one part to host memory, off the loop, then calls back with the copy.

Cancelled, it does not call back.
"""


def may_begin(
    entry: StoredEntry, holder: MapHolder | None = None, *, streams: bool
) -> bool:
    """May an offer go out before the entry is whole?

    A stream shows what it gets: it must not see a plain insert that can still
    be withdrawn. What is small rides with its offer, once it is whole; what will be
    read where it lies is read then.
    """
    if streams:
        return entry.draft.streaming
    return not entry.is_small and not can_be_mapped(entry, holder)


def make_offer(
    link: Link,
    stream: LinkStream,
    lease: Lease,
    holder: MapHolder | None = None,
    *,
    hoist: Hoist | None = None,
    copies: Sequence[SlabRegion] = (),
) -> Offering:
    """Offer what was leased, with its bytes if they are small and all there.

    With a ``holder`` who has mapped them, or ``copies`` of what is on a GPU, it is told
    where they lie. ``hoist`` brings what is on a GPU to the host, for lanes. The copies
    are released when the delivery ends.

    :raises EntryTooLarge: its tokens, roi and names do not fit in a frame
    """
    entry = lease.entry
    regions = entry.regions[: len(entry.parts)]
    # Not even what is small has bytes at hand that lie on a GPU.
    is_at_hand = not any(region.is_on_device for region in regions)
    inline = entry.complete and entry.is_small and is_at_hand
    body = entry.preamble()
    pin = mapped = None
    if inline:
        pieces = [_read(region) for region in regions]
        body = b"".join((body, *pieces))
    elif holder is not None and entry.complete and can_be_mapped(entry, holder):
        if (shown := map_entry(entry, holder, copies)) is not None:
            pin, mapped, places = shown
            body += places
    try:
        check_body(link.limits.max_body_bytes, body)
    except BaseException:
        if holder is not None and pin is not None:
            holder.unpin(pin.number)
        release(copies)
        raise
    transfer = link.new_transfer()
    offering = Offering(
        link, stream, entry, transfer, pin=pin, hoist=hoist, copies=copies
    )
    offer = Offer(
        transfer=offering.transfer,
        inline=inline,
        entry_id=entry.entry_id,
        token=lease.token,
        attempt=lease.attempt,
        matched_tokens=lease.matched_tokens,
        complete=entry.complete,
        mapped=mapped,
    )
    stream.send(offer, body)
    return offering


class Offering(msgspec.Struct, eq=False):
    """An offer that has left. Its parts follow once the peer grants them memory.

    If it has a ``pin``, they are the peer's to read already.
    """

    link: Link
    stream: LinkStream
    entry: StoredEntry
    transfer: int
    is_granted: bool = False
    pin: Pin | None = None
    hoist: Hoist | None = None
    copies: Sequence[SlabRegion] = ()
    _riding: RidingParts | None = None
    _hoisted: list[asyncio.Task[None]] = msgspec.field(default_factory=list)
    _by_gpu: GpuSending | None = None

    def grant(self, transfer: int, by_gpu: GpuSending | None = None) -> None:
        """The peer's memory is ready: send what has landed."""
        if self.pin is not None:
            raise RemoteProtocolError("a Grant for what lies in mapped memory")
        if transfer == self.transfer and not self.is_granted:
            self.is_granted = True
            self._by_gpu = by_gpu
            for index in self.entry.landed:
                self._send(index)

    def grant_devices(
        self, frame: GrantDevices, way: GpuLink, digest_part: DigestPart
    ) -> None:
        """As :meth:`grant`, of memory of the peer's GPU; what rides rides."""
        by_gpu = GpuSending(way, self.stream, frame, digest_part)
        self.grant(frame.transfer, by_gpu)

    def part_landed(self, index: int) -> None:
        """One more part can be sent."""
        if self.is_granted:
            self._send(index)

    def completed(self) -> None:
        """The entry is committed: nothing more comes."""
        self.stream.send(Complete(self.transfer))

    def retract(self) -> None:
        """The offer is void."""
        self.stream.send(Retract(self.transfer))

    def stop(self) -> None:
        """Send no more parts. What was pinned stays so until the peer lets it go."""
        if self.is_granted:
            self.is_granted = False
            self.link.payload.stop(self.transfer)
            if self._by_gpu is not None:
                self._by_gpu.stop()
            if self._riding is not None:
                self._riding.stop()
        for task in self._hoisted:
            task.cancel()
        release(self.copies)

    def _send(self, index: int) -> None:
        part = self.entry.parts[index]
        region = part.region
        if region is None:
            return
        if self._by_gpu is not None and not rides(region.nbytes):
            self._by_gpu.send(index, region, part.spec, part.digest)
        elif region.is_on_device and self.hoist is not None:
            copied = partial(self._send_copy, index)
            self._hoisted.append(self.hoist(region, part.spec, copied))
        else:
            read = partial(_read, region)
            self._send_bytes(index, region.nbytes, read, region.memory)

    def _send_copy(self, index: int, copy: memoryview) -> None:
        """A copy in host memory is there; it is let go when it was sent."""
        self._send_bytes(index, copy.nbytes, lambda: copy, lambda: copy)

    def _send_bytes(
        self,
        index: int,
        nbytes: int,
        read: Callable[[], memoryview],
        memory: Callable[[], Memory],
    ) -> None:
        transfer, stream = self.transfer, self.stream
        digest = self.entry.parts[index].digest or None
        if rides(nbytes):
            if self._riding is None:
                self._riding = RidingParts(self.link, stream, transfer)
            self._riding.add(index, nbytes, read, digest)
            return

        def sent(digest: bytes, error: BaseException | None) -> None:
            if error is None:
                stream.send(Done(transfer, index, digest))

        self.link.payload.send(transfer, index, memory(), sent, digest=digest)


def release(copies: Iterable[SlabRegion]) -> None:
    """Give back what was copied for one delivery, but for what the peer has of it."""
    for copy in copies:
        copy.release()


def _read(region: Region) -> memoryview:
    return region.view() if region.pages is None else joined(region.memory())
