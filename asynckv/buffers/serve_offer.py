"""One delivery on its way to a peer: the offer, then the parts that do not ride along.

Plain functions; nothing here waits or knows how a delivery ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import msgspec
import torch

from asynckv.buffers.entries import Lease, Part, StoredEntry
from asynckv.buffers.manifest import check_body
from asynckv.buffers.serve_mapped import can_be_mapped, map_entry
from asynckv.buffers.sharing import MapHolder, Pin
from asynckv.errors import EntryTooLarge, RemoteProtocolError
from asynckv.links.link import Link
from asynckv.links.requests import LinkStream
from asynckv.links.riding import RidingParts, rides
from asynckv.protocol.frames import (
    Complete,
    Offer,
    Retract,
)
from asynckv.protocol.payload_frames import Done
from asynckv.tensors.arena import Region
from asynckv.tensors.runs import joined
from asynckv.tensors.views import bytes_of

__all__ = ("Hoist", "Offering", "make_offer", "may_begin")

Hoist: TypeAlias = Callable[
    [Part, Callable[[torch.Tensor], None]], "asyncio.Task[None]"
]
"""Copies one part to host memory, off the loop, then calls back with the copy."""


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
) -> Offering:
    """Offer what was leased, with its bytes if they are small and all there.

    With a ``holder`` who has mapped them, it is told where they lie. ``hoist`` brings
    what is on a GPU to the host, for lanes.

    :raises EntryTooLarge: its tokens, roi and names do not fit in a frame
    """
    entry = lease.entry
    inline = entry.complete and entry.is_small
    body = entry.preamble()
    pin = mapped = None
    if inline:
        pieces = [_read(region) for region in entry.regions[: len(entry.parts)]]
        body = b"".join((body, *pieces))
    elif holder is not None and entry.complete and can_be_mapped(entry, holder):
        pin, mapped, places = map_entry(entry, holder)
        body += places
    try:
        check_body(link.limits.max_body_bytes, body)
    except EntryTooLarge:
        if holder is not None and pin is not None:
            holder.unpin(pin.number)
        raise
    offering = Offering(link, stream, entry, link.new_transfer(), pin=pin, hoist=hoist)
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
    _riding: RidingParts | None = None
    _hoisted: list[asyncio.Task[None]] = msgspec.field(default_factory=list)

    def grant(self, transfer: int) -> None:
        """The peer's memory is ready: send what has landed."""
        if self.pin is not None:
            raise RemoteProtocolError("a Grant for what lies in mapped memory")
        if transfer == self.transfer and not self.is_granted:
            self.is_granted = True
            for index in self.entry.landed:
                self._send(index)

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
            if self._riding is not None:
                self._riding.stop()
        for task in self._hoisted:
            task.cancel()

    def _send(self, index: int) -> None:
        part, transfer, stream = self.entry.parts[index], self.transfer, self.stream
        if part.region is None:
            return
        if part.region.is_on_device and self.hoist is not None:
            self._hoisted.append(self.hoist(part, partial(self._send_copy, index)))
            return
        nbytes, digest = part.region.nbytes, part.digest or None
        if rides(nbytes):
            if self._riding is None:
                self._riding = RidingParts(self.link, stream, transfer)
            self._riding.add(index, nbytes, partial(_read, part.region), digest)
            return

        def sent(digest: bytes, error: BaseException | None) -> None:
            if error is None:
                stream.send(Done(transfer, index, digest))

        memory = part.region.memory()
        self.link.payload.send(transfer, index, memory, sent, digest=digest)

    def _send_copy(self, index: int, copy: torch.Tensor) -> None:
        """A copy in host memory is there; it is let go when it was sent."""
        if not self.is_granted:
            return
        part, transfer, stream = self.entry.parts[index], self.transfer, self.stream

        def sent(digest: bytes, error: BaseException | None) -> None:
            if error is None:
                stream.send(Done(transfer, index, digest))

        memory, digest = bytes_of(copy), part.digest or None
        self.link.payload.send(transfer, index, memory, sent, digest=digest)


def _read(region: Region) -> memoryview:
    return region.view() if region.pages is None else joined(region.memory())
