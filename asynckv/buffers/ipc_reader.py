"""Reading an offer's tensors in a peer's memory of a GPU: views, or one copy there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch

from asynckv.buffers.importing import ImportedMemory
from asynckv.buffers.manifest import Manifest, verify
from asynckv.buffers.map_reader import MappedParts, MapReader
from asynckv.buffers.shown_arrivals import ShownParts
from asynckv.errors import ChecksumError, RemoteProtocolError
from asynckv.links.exporting import edges_in
from asynckv.links.riding import rides
from asynckv.protocol.digests import digest_of
from asynckv.protocol.frames import Offer
from asynckv.protocol.values import MappedOffer
from asynckv.tensors.blocks import KVMemory, tensor_at
from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.device_copying import DeviceCopyPool
from asynckv.tensors.views import tensor_from
from asynckv.types import TensorSpec

__all__ = ("IpcReader",)


class IpcReader(MapReader):
    """Reads what ``memory`` shows of a GPU, into tensors of the same GPU.

    As its contract says; a call that is cancelled ends when the GPU is done too.
    """

    reads_host: ClassVar[bool] = False

    def __init__(
        self, memory: ImportedMemory, pool: DeviceCopyPool, *, views: bool
    ) -> None:
        super().__init__(memory, pool, views=views)
        self._imported = memory
        self._device_pool = pool

    def unpack(
        self,
        offer: Offer,
        mapped: MappedOffer,
        body: bytes,
        *,
        by_parts: bool = False,
    ) -> tuple[Manifest, MappedParts]:
        manifest, parts = super().unpack(offer, mapped, body, by_parts=by_parts)
        if any(place is not None and len(place.runs) > 1 for place in parts.places):
            parts.let_go()  # the error would keep it, as long as somebody keeps that
            raise RemoteProtocolError("a tensor of a GPU in several places")
        return manifest, parts

    def unpack_parts(
        self, offer: Offer, mapped: MappedOffer, body: bytes
    ) -> tuple[Manifest, ShownParts]:
        """As :meth:`unpack`, of a stream: each part is read once it lies there.

        :raises RemoteProtocolError: as there, or parts that ride have a place
        """
        manifest, parts = self.unpack(offer, mapped, body, by_parts=True)
        shown = ShownParts(
            *(parts.places, parts.sizes, parts.edges, parts.pin),
            *(self._imported, self._device_pool),
        )
        parts.let_go()
        every = zip(shown.places, shown.sizes, strict=True)
        if any(rides(nbytes) is (place is not None) for place, nbytes in every):
            shown.let_go()  # as there
            raise RemoteProtocolError("a part of a stream that rides has a place")
        return manifest, shown

    async def _read(
        self,
        manifest: Manifest,
        parts: MappedParts,
        targets: Mapping[str, KVMemory],
        empty: Callable[[TensorSpec], torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        # What lives as long as the pin: the copies' sources, and bases of views.
        sources = self._sources(parts)
        try:
            await self._verify_device_edges(parts, sources)
            return await self._land(manifest, sources, targets)
        finally:
            sources.clear()  # an error's traceback would keep what is in it
            parts.let_go()

    def _sources(self, parts: MappedParts) -> list[DeviceMemory | None]:
        imported = self._imported.imported
        return [
            None if place is None else imported.part(place, nbytes, parts.pin)
            for place, nbytes in zip(parts.places, parts.sizes, strict=True)
        ]

    async def _verify_device_edges(
        self, parts: MappedParts, sources: list[DeviceMemory | None]
    ) -> None:
        if self.memory.digest != "edges" or not parts.edges:
            return
        there = [source for source in sources if source is not None]
        reading = self._device_pool.edges(there)
        del there  # an error's traceback would keep the peer's memory in use
        found = iter(await reading)
        edges = [b"" if place is None else next(found) for place in parts.places]
        if edges_in(parts.places, edges) != parts.edges:
            raise ChecksumError(
                "what lies in the GPU's memory is not what was offered",
                hint="the delivery was refused; nothing of it was used",
            )

    async def _land(
        self,
        manifest: Manifest,
        sources: list[DeviceMemory | None],
        targets: Mapping[str, KVMemory],
    ) -> dict[str, torch.Tensor]:
        inline = iter(manifest.inline)
        tensors, copies = dict[str, torch.Tensor](), set[str]()
        shown = list[DeviceMemory]()
        origins, places = list[DeviceMemory | torch.Tensor](), list[KVMemory]()
        for record, source in zip(manifest.records, sources, strict=True):
            target = targets.get(record.name)
            if source is not None and target is None and self.views:
                over = self._imported.gpus.tensors.tensor_over
                tensors[record.name] = over(source, record.spec)
                shown.append(source)
                continue
            copies.add(record.name)
            if source is None:
                piece = next(inline)
                verify(record, digest_of(piece))
                origins.append(tensor_from(piece, record.spec))
            else:
                origins.append(source)
            place = self._device_pool.empty(record.spec) if target is None else target
            places.append(place)
            tensors[record.name] = tensor_at(place)
        is_full = self.memory.digest == "full"
        copying = self._device_pool.copy(origins, places, digest=is_full)
        # An error's traceback would keep the peer's memory in use.
        source, origins = None, []
        try:
            copied = iter(await copying)
            if is_full:
                found = iter(await self._device_pool.digest(shown))
                for record in manifest.records:
                    is_view = record.name not in copies
                    verify(record, next(found) if is_view else next(copied))
        except BaseException:
            tensors.clear()
            raise
        finally:
            shown.clear()
        return tensors
