"""Reading an offer's tensors in memory that its owner shows: views, or one copy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final, TypeAlias

import msgspec
import numpy
import numpy.typing
import torch

from asynckv.buffers.delivery import Delivery
from asynckv.buffers.lifting import on_host
from asynckv.buffers.manifest import Manifest, unpack_mapped, verify
from asynckv.buffers.mapped import MappedMemory, MappedPin
from asynckv.buffers.receive_budget import ReceiveBudget
from asynckv.errors import AsyncKVError, ChecksumError, RemoteProtocolError
from asynckv.protocol.digests import digest_of
from asynckv.protocol.frames import Offer
from asynckv.protocol.values import MappedOffer, Place, TensorRecord
from asynckv.tensors.blocks import KVMemory, memory_of, tensor_at
from asynckv.tensors.copying import CopyPool
from asynckv.tensors.jobs import CopyJob
from asynckv.tensors.long_copies import RunsCopy, long_copies
from asynckv.tensors.packing import SHARED_PAGES_BELOW
from asynckv.tensors.runs import Runs, fill
from asynckv.tensors.shared_file import MappedFile, check_place, edges_of
from asynckv.tensors.views import tensor_from, tensor_over
from asynckv.types import TensorSpec

__all__ = ("MapReader", "MappedParts")

_BYTES: Final = "uint8"

_AT_A_TIME: Final = 16
"""Views of mapped memory take their time to be made, on the loop."""

_Bytes: TypeAlias = numpy.typing.NDArray[numpy.uint8]


class MappedParts(msgspec.Struct, eq=False):
    """Where the parts of one offer lie, checked, and who keeps them there."""

    places: Sequence[Place | None]
    sizes: Sequence[int]
    edges: bytes
    pin: MappedPin | None

    def let_go(self) -> None:
        """Only views keep them there from now on."""
        self.pin = None


class MapReader:
    """Reads what ``memory`` shows, for any number of calls.

    With ``views`` nothing is copied but what lands in memory of the caller. What
    ``is_for_gpu`` is shown until :func:`~asynckv.buffers.lifting.lift_all` has copied
    it to the GPU, and counts as received.
    """

    reads_host: ClassVar[bool] = True
    """Is it memory of the host that is read?"""

    def __init__(
        self,
        memory: MappedMemory,
        pool: CopyPool,
        *,
        views: bool,
        is_for_gpu: bool = False,
    ) -> None:
        self.views = views or is_for_gpu
        self.is_charged = is_for_gpu or not views
        """Does what it returns count as received?"""
        self._is_in_host = self.reads_host and not is_for_gpu
        self.memory = memory
        self._pool = pool

    def unpack(
        self,
        offer: Offer,
        mapped: MappedOffer,
        body: bytes,
        *,
        by_parts: bool = False,
    ) -> tuple[Manifest, MappedParts]:
        """Read the offer; from here on its memory is ours to let go.

        Of a stream, ``by_parts``, no tensor's bytes came along.

        :raises RemoteProtocolError: it is not exactly what it says, or does not lie
            in the memory that we have mapped
        """
        manifest, places = unpack_mapped(body, mapped.nbytes, inline=not by_parts)
        sizes = [record.spec.nbytes for record in manifest.records]
        file_nbytes = self.memory.file.nbytes
        try:
            for place, nbytes in zip(places, sizes, strict=True):
                if place is not None:
                    check_place(place, nbytes, file_nbytes)
        except ValueError as exc:
            raise RemoteProtocolError(f"an offer of {exc}") from exc
        # Not before: the error would keep it, as long as somebody keeps the error.
        pin = self.memory.take(mapped.pin)
        return manifest, MappedParts(places, sizes, mapped.edges, pin)

    async def take(
        self,
        delivery: Delivery,
        targets: Mapping[str, KVMemory],
        budget: ReceiveBudget,
        stands: Callable[[Delivery], bool],
    ) -> None:
        """Let all of a delivery land, verified: in ``targets`` what is named there.

        Others are views, of which those below 64 KiB are copies that ``budget`` counts,
        or are copied to memory of ``budget``; so is what is to land on a GPU, where
        this reads memory of the host. If the delivery does not
        ``stand`` any more nothing has landed. A cancelled call ends when no
        thread touches memory of the caller any more. However it ends, the peer's
        memory is kept by views alone.

        :raises ChecksumError: some bytes are not those that were inserted
        :raises AsyncKVError: others here have views of it, and this process can map
            nothing more
        :raises ValueError: ``targets`` do not fit the entry
        """
        parts = delivery.mapped
        if self.reads_host:
            targets = on_host(targets)
        nbytes = 0
        if targets or self.is_charged:
            nbytes = delivery.own_nbytes(targets)
        if not self.is_charged:
            nbytes = _small_nbytes(delivery.manifest, parts, targets) if parts else 0
        if nbytes:
            await budget.reserve(nbytes, in_host=self._is_in_host and self.is_charged)
            delivery.charged_bytes = nbytes
        tensors = None
        if parts is not None and stands(delivery):
            tensors = await self._read(delivery.manifest, parts, targets, budget.empty)
        if tensors is not None and stands(delivery):
            delivery.land(tensors)
        else:
            delivery.uncharge(budget)

    async def _read(
        self,
        manifest: Manifest,
        parts: MappedParts,
        targets: Mapping[str, KVMemory],
        empty: Callable[[TensorSpec], torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        file = self._file_for(parts)
        job = _Job(file, parts.pin, targets, empty, views=self.views)
        try:
            if self.memory.digest == "edges":
                _verify_edges(file, parts)
            inline = iter(manifest.inline)
            every = zip(manifest.records, parts.places, parts.sizes, strict=True)
            for index, (record, place, nbytes) in enumerate(every, 1):
                if place is None:
                    job.land(record, next(inline))
                else:
                    job.add(record, place, nbytes)
                if not index % _AT_A_TIME:
                    await asyncio.sleep(0)
            await job.run(self._pool, is_full=self.memory.digest == "full")
            return job.take()
        finally:
            job.take()  # an error's traceback would keep what is in it
            parts.let_go()

    def _file_for(self, parts: MappedParts) -> MappedFile:
        """Return a mapping that shows what the owner has there, to nobody else here.

        :raises AsyncKVError: this process can map nothing more
        """
        file = self.memory.file
        if parts.pin is not None:  # by no name of its own, that an error would keep
            parts.pin.claim = file.claim(parts.places)
            if parts.pin.claim is not None:
                return file
        try:
            return file.again()
        except OSError as exc:
            raise AsyncKVError(
                f"memory of which there are views here cannot be mapped again: {exc}",
                hint="let go of views of the same entry or value, and ask again",
            ) from exc


def _small_nbytes(
    manifest: Manifest, parts: MappedParts, targets: Mapping[str, KVMemory]
) -> int:
    """Return how many bytes are copied for views: of tensors that share pages."""
    every = zip(manifest.records, parts.places, parts.sizes, strict=True)
    return sum(
        nbytes
        for record, place, nbytes in every
        if place is not None
        and nbytes < SHARED_PAGES_BELOW
        and record.name not in targets
    )


def _verify_edges(file: MappedFile, parts: MappedParts) -> None:
    found = edges_of(file.memory, parts.places, parts.sizes)
    if parts.edges and found != parts.edges:
        raise ChecksumError(
            "what lies in shared memory is not what was offered",
            hint="the delivery was refused; nothing of it was used",
        )


class _Job:
    """The tensors of one delivery: shown at once, or copied by :meth:`run`."""

    def __init__(
        self,
        file: MappedFile,
        keeper: MappedPin | None,
        targets: Mapping[str, KVMemory],
        empty: Callable[[TensorSpec], torch.Tensor],
        *,
        views: bool,
    ) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._file = file
        self._claim = None if keeper is None else keeper.claim
        self._lent: _Bytes | None = file.lend(keeper)
        self._targets = targets
        self._empty = empty
        self._views = views
        self._from: list[torch.Tensor] = []
        self._to: list[torch.Tensor] = []
        self._scattered: list[CopyJob] = []
        self._records: list[TensorRecord] = []
        self._places: list[KVMemory] = []

    def land(self, record: TensorRecord, piece: memoryview) -> None:
        """Take a tensor whose few bytes rode along."""
        verify(record, digest_of(piece))
        target = self._targets.get(record.name)
        if target is None:
            target = tensor_from(piece, record.spec)
        else:
            fill(memory_of(target), piece)
        self._tensors[record.name] = tensor_at(target)

    def add(self, record: TensorRecord, place: Place, nbytes: int) -> None:
        """Show a tensor, or note what is to be copied for it."""
        spec, target = record.spec, self._targets.get(record.name)
        self._records.append(record)
        if target is None and self._views and self._lent is not None:
            if nbytes < SHARED_PAGES_BELOW:
                piece = b"".join(one.data for one in self._file.pieces(place, nbytes))
                target = tensor_from(piece, spec)
                self._places.append(target)
                self._tensors[record.name] = target
                return
            try:
                tensor = self._file.view(place, spec, nbytes, self._lent)
                if self._claim is not None and len(place.runs) == 1:
                    self._claim.shown += place.runs
                self._places.append(tensor)
                self._tensors[record.name] = tensor
                return
            except OSError:  # it lies apart, and the process has too many mappings
                pass
        target = self._empty(spec) if target is None else target
        self._places.append(target)
        self._tensors[record.name] = tensor_at(target)
        memory, start = memory_of(target), 0
        pieces = self._file.pieces(place, nbytes)
        if isinstance(memory, Runs):
            self._scattered.append(RunsCopy([piece.data for piece in pieces], memory))
            return
        for source in pieces:
            there = memory[start : start + source.nbytes]
            some = TensorSpec((source.nbytes,), _BYTES)
            self._from.append(tensor_over(source, some))
            self._to.append(tensor_over(there, some))
            start += source.nbytes

    def take(self) -> dict[str, torch.Tensor]:
        """Return the tensors, and keep none."""
        tensors, self._tensors = self._tensors, {}
        self._from.clear()
        self._to.clear()
        self._scattered.clear()
        self._places.clear()
        self._lent = None
        return tensors

    async def run(self, pool: CopyPool, *, is_full: bool) -> None:
        """Copy what is to be copied; with ``is_full`` verify every byte."""
        if is_full and len(self._from) == len(self._records):
            # While they are hot, where each tensor lies in one piece.
            digests = await pool.copy(self._from, self._to)
        else:
            if self._from or self._scattered:
                copies = long_copies(self._from, self._to)
                await pool.run([*self._scattered, *copies])
                del copies  # they keep what they have copied
            if not is_full:
                return
            digests = await pool.digest(self._places)
        for record, found in zip(self._records, digests, strict=True):
            verify(record, found)
