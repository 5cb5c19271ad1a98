"""The asking side of one remote ``get``."""

from __future__ import annotations

import dataclasses

import torch

from asynckv.buffers.answers import Answer, fail_by
from asynckv.buffers.delivery import Delivery
from asynckv.buffers.gpu_arrivals import GpuArrivals, Ways
from asynckv.buffers.gpu_places import ready_memory
from asynckv.buffers.manifest import unpack, verify_inline
from asynckv.buffers.map_reader import MapReader
from asynckv.buffers.receive_budget import ReceiveBudget
from asynckv.errors import PeerLost, RemoteProtocolError
from asynckv.links.link import Link
from asynckv.links.receiving import Reception
from asynckv.protocol.device_frames import GrantDevices, SentDevices
from asynckv.protocol.frames import (
    Cancel,
    Frame,
    Get,
    Offer,
    Result,
    Took,
)
from asynckv.protocol.payload_frames import Done, Grant
from asynckv.protocol.values import TensorRecord
from asynckv.tensors.copying import CopyPool
from asynckv.tensors.device_copying import DeviceCopyPool
from asynckv.tensors.device_tensors import gpu_of
from asynckv.tensors.views import bytes_of, check_into, spec_of, tensor_from

__all__ = ("Getting", "GettingBy")


@dataclasses.dataclass(frozen=True, slots=True)
class GettingBy:
    """What values come by, and land in: ``reader`` has memory of the peer's open.

    ``pool`` is of the GPU that values are wanted on, if they are.
    """

    budget: ReceiveBudget
    pool: CopyPool
    reader: MapReader | None = None
    ways: Ways | None = None


class Getting:
    """One value on its way here, on one link. Given up, it needs :meth:`cancel`."""

    def __init__(
        self, link: Link, key: str, into: torch.Tensor | None, by: GettingBy
    ) -> None:
        self._key = key
        self._link = link
        self._into = into
        self._by = by
        self._charged_bytes = 0
        self._delivery: Delivery | None = None
        self._reception: Reception | None = None
        self._arrivals: GpuArrivals | None = None
        self._offer: Answer[Delivery | None] = Answer()
        self._landed: Answer[None] = Answer()
        self._stream = link.open_stream(self, Get(key))

    async def value(self) -> torch.Tensor | None:
        """Return the tensor, verified, or ``None``.

        :raises Exception: what the peer says, or ``PeerLost``
        """
        delivery = await self._offer
        if delivery is None:
            return None
        (record,) = delivery.manifest.records
        if self._into is not None:
            check_into(self._into, record.spec, self._key)
        if delivery.offer.inline:
            return await self._take_inline(delivery, record)
        reader = self._by.reader
        if delivery.mapped is not None and reader is not None:
            tensor = await self._read(delivery, record, reader)
        elif (arrivals := self._find_way()) is not None:
            tensor = await self._receive_on_gpu(delivery, record, arrivals)
        else:
            tensor = await self._receive(delivery, record)
        self._stream.send(Took(b""))
        return tensor

    def release(self) -> None:
        """The tensor is the application's now, or nobody's. Never waits."""
        budget = self._by.budget
        budget.release(self._charged_bytes)
        self._charged_bytes = 0
        if self._delivery is not None:
            self._delivery.uncharge(budget)
            self._delivery.forget()

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
                self._on_offer(frame, body)
            case Done():
                if self._reception is not None:
                    self._reception.on_done(frame)
            case SentDevices():
                self._on_sent(frame)
            case Result():
                self._offer.give(None)
            case _:
                fail_by(frame, "get", self._fail)

    def on_lost(self, error: PeerLost) -> None:
        self._fail(error)

    def _on_offer(self, offer: Offer, body: bytes) -> None:
        reader, parts = self._by.reader, None
        if offer.mapped is None:
            manifest = unpack(body, inline=offer.inline)
            self._link.payload.announce(offer.transfer)
        elif reader is None or offer.inline:
            raise RemoteProtocolError("an offer of memory that is not mapped")
        else:
            manifest, parts = reader.unpack(offer, offer.mapped, body)
        if len(manifest.records) != 1:
            if parts is not None:
                parts.let_go()  # the error would keep it
            raise RemoteProtocolError("a value is one tensor")
        if not self._offer.is_in:  # else nobody wants it: let it go
            self._delivery = Delivery(offer, manifest, parts)
            self._offer.give(self._delivery)

    def _on_sent(self, frame: SentDevices) -> None:
        if self._arrivals is None:
            raise RemoteProtocolError("a part of a GPU that was not asked for")
        if self._reception is not None:
            self._arrivals.sent(frame)
            self._reception.on_done(Done(frame.transfer, frame.part, frame.digest))

    @property
    def _is_for_gpu(self) -> bool:
        if self._into is None:
            return isinstance(self._by.pool, DeviceCopyPool)
        return gpu_of(self._into) is not None

    def _find_way(self) -> GpuArrivals | None:
        ways = self._by.ways
        if ways is not None and self._is_for_gpu:
            self._arrivals = ways.arrivals(self._link)
        return self._arrivals

    async def _take_inline(
        self, delivery: Delivery, record: TensorRecord
    ) -> torch.Tensor:
        verify_inline(delivery.manifest)
        piece = delivery.manifest.inline[0]  # at most 64 KiB
        if self._is_for_gpu:
            return await self._lifted(tensor_from(piece, record.spec))
        target = self._into
        if target is None:
            target = self._by.budget.empty(record.spec)
        bytes_of(target)[:] = piece
        return target

    async def _read(
        self, delivery: Delivery, record: TensorRecord, reader: MapReader
    ) -> torch.Tensor:
        """Copy it from memory of the peer's, where it is kept meanwhile."""
        targets = {} if self._into is None else {record.name: self._into}
        await reader.take(delivery, targets, self._by.budget, self._stands)
        self._landed.check()
        return delivery.tensors[record.name]

    def _stands(self, delivery: Delivery) -> bool:
        return not self._landed.is_in

    async def _receive(self, delivery: Delivery, record: TensorRecord) -> torch.Tensor:
        is_for_gpu, target = self._is_for_gpu, self._into
        if target is None or is_for_gpu:
            await self._reserve(record.spec.nbytes)
            target = self._by.budget.empty(record.spec)
        transfer = delivery.offer.transfer
        self._reception = Reception(self._link, transfer, [bytes_of(target)], self)
        self._reception.begin()
        self._stream.send(Grant(transfer))
        await self._landed
        return await self._lifted(target) if is_for_gpu else target

    async def _receive_on_gpu(
        self, delivery: Delivery, record: TensorRecord, arrivals: GpuArrivals
    ) -> torch.Tensor:
        """As :meth:`_receive`, from another GPU to this one."""
        target = self._into
        if target is None:
            await self._reserve(record.spec.nbytes, in_host=False)
            target = arrivals.pool.empty(record.spec)
        memory = await ready_memory(arrivals.pool.memory_of(target))
        self._landed.check()
        transfer = delivery.offer.transfer
        self._reception = Reception(
            *(self._link, transfer, [memory], self),
            payload=arrivals,
            progress=arrivals.progress,
        )
        del memory
        self._reception.begin()
        self._stream.send(GrantDevices(transfer, arrivals.digest))
        await self._landed
        return target

    async def _reserve(self, nbytes: int, *, in_host: bool = True) -> None:
        await self._by.budget.reserve(nbytes, in_host=in_host)
        self._charged_bytes = nbytes

    async def _lifted(self, tensor: torch.Tensor) -> torch.Tensor:
        """Bring what has come through host memory to the GPU where it is wanted."""
        pool, target = self._by.pool, self._into
        if target is None:
            target = pool.empty(spec_of(tensor))
        await pool.copy([tensor], [target], digest=False)
        return target

    def _fail(self, error: Exception) -> None:
        self._offer.fail(error)
        self._landed.fail(error)
