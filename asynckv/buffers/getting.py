"""The asking side of one remote ``get``."""

from __future__ import annotations

import torch

from asynckv.buffers.answers import Answer, fail_by
from asynckv.buffers.manifest import Manifest, unpack, verify_inline
from asynckv.buffers.receive_budget import ReceiveBudget
from asynckv.errors import PeerLost, RemoteProtocolError
from asynckv.links.link import Link
from asynckv.links.receiving import Reception
from asynckv.protocol.frames import (
    Cancel,
    Frame,
    Get,
    Offer,
    Result,
    Took,
)
from asynckv.protocol.payload_frames import Done, Grant
from asynckv.tensors.views import bytes_of, check_into

__all__ = ("Getting",)


class Getting:
    """One value on its way here, on one link. Given up, it needs :meth:`cancel`."""

    def __init__(
        self, link: Link, key: str, into: torch.Tensor | None, budget: ReceiveBudget
    ) -> None:
        self._key = key
        self._link = link
        self._into = into
        self._budget = budget
        self._charged_bytes = 0
        self._reception: Reception | None = None
        self._offer: Answer[tuple[Offer, Manifest] | None] = Answer()
        self._landed: Answer[None] = Answer()
        self._stream = link.open_stream(self, Get(key))

    async def value(self) -> torch.Tensor | None:
        """Return the tensor, verified, or ``None``.

        :raises Exception: what the peer says, or ``PeerLost``
        """
        found = await self._offer
        if found is None:
            return None
        offer, manifest = found
        (record,) = manifest.records
        if self._into is not None:
            check_into(self._into, record.spec, self._key)
        elif not offer.inline:
            await self._budget.reserve(record.spec.nbytes)
            self._charged_bytes = record.spec.nbytes
        target = self._budget.empty(record.spec) if self._into is None else self._into
        if offer.inline:
            verify_inline(manifest)
            bytes_of(target)[:] = manifest.inline[0]  # at most 64 KiB
        else:
            await self._receive(offer.transfer, target)
        return target

    def release(self) -> None:
        """The tensor is the application's now, or nobody's. Never waits."""
        self._budget.release(self._charged_bytes)
        self._charged_bytes = 0

    def cancel(self) -> None:
        """The value is not wanted any more. Never waits."""
        self._stream.send(Cancel())
        if self._reception is not None:
            self._reception.stop()

    async def quiesce(self) -> None:
        """Wait until nothing touches memory that the caller lent (at most 1 s)."""
        if self._reception is not None and self._into is not None:
            await self._reception.quiesce()

    def part_verified(self, index: int, digest: bytes) -> None:
        self._landed.give(None)

    def reception_failed(self, error: Exception) -> None:
        self._landed.fail(error)

    def on_frame(self, frame: Frame, body: bytes) -> None:
        match frame:
            case Offer():
                manifest = unpack(body, inline=frame.inline)
                self._link.payload.announce(frame.transfer)
                if len(manifest.records) != 1:
                    raise RemoteProtocolError("a value is one tensor")
                self._offer.give((frame, manifest))
            case Done():
                if self._reception is not None:
                    self._reception.on_done(frame)
            case Result():
                self._offer.give(None)
            case _:
                fail_by(frame, "get", self._fail)

    def on_lost(self, error: PeerLost) -> None:
        self._fail(error)

    async def _receive(self, transfer: int, target: torch.Tensor) -> None:
        self._reception = Reception(self._link, transfer, [bytes_of(target)], self)
        self._reception.begin()
        self._stream.send(Grant(transfer))
        await self._landed
        self._stream.send(Took(b""))

    def _fail(self, error: Exception) -> None:
        self._offer.fail(error)
        self._landed.fail(error)
