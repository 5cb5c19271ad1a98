"""Reading an offer's tensors in memory that its owner shows: views, or one copy.

The memory is mapped from the host's, or a GPU's that is open here. Of a stream the
peer has offered where parts will lie, and says of each when it lies there. What is not
copied is not used: the memory may be somebody else's once it was let go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import ClassVar, Final, TypeAlias, cast

import numpy
import numpy.typing
import torch

from asynckv.devices.copying import CopyPool
from asynckv.devices.cuda import DeviceMemory
from asynckv.errors import ChecksumError, GPUFailed, RemoteProtocolError
from asynckv.links.link import Link
from asynckv.protocol.transfer import EAGER_NBYTES
from asynckv.protocol.transfer_frames import Sent
from asynckv.protocol.values import MappedOffer, Place
from asynckv.protocol.wire import digest_of
from asynckv.sharing.exporter import edges_in
from asynckv.sharing.gpu_channel import RouteLost, other_bytes
from asynckv.sharing.imports import ImportedMemory
from asynckv.sharing.mappings import MappedMemory, MappedPin
from asynckv.tensors.blocks import KVMemory, tensor_at
from asynckv.tensors.jobs import CopyJob, RunsCopy, long_copies
from asynckv.tensors.pages import SHARED_PAGES_BELOW
from asynckv.tensors.runs import Memory, Runs, fill
from asynckv.tensors.shared_file import MappedFile, check_place, edges_of
from asynckv.tensors.views import memory_of, tensor_from, tensor_over
from asynckv.transfers.delivery import Delivery, MappedParts, ReceiveBudget, on_host
from asynckv.transfers.manifest import Manifest, unpack_mapped, verify
from asynckv.transfers.read_route import DoneCallback, ReadRoute
from asynckv.types import TensorSpec
from asynckv.waits.waiting import clear_all_frames

__all__ = (
    "ExportedParts",
    "IpcReader",
    "IpcStreamRoute",
    "MapReader",
    "Unreadable",
)


_BYTES: Final = "uint8"

_AT_A_TIME: Final = 16
"""Views of mapped memory take their time to be made, on the loop."""

_Bytes: TypeAlias = numpy.typing.NDArray[numpy.uint8]


class Unreadable(Exception):
    """What the peer shows cannot be read there: it has to come by another route."""


class MapReader:
    """Reads what ``memory`` shows, for any number of calls.

    With ``views`` nothing is copied but what lands in memory of the caller. What
    ``is_for_gpu`` is shown until :func:`~asynckv.transfers.delivery.move_to_device` has
    copied it to the GPU, and counts as received.
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
        self._is_charged = is_for_gpu or not views
        """Does what it returns count as received?"""
        self.memory = memory
        self._pool = pool

    def unpack(
        self, mapped: MappedOffer, body: bytes, *, by_parts: bool = False
    ) -> tuple[Manifest, MappedParts]:
        """Read the offer; from here on its memory is ours to let go.

        Of a stream, ``by_parts``, no tensor's bytes came along.

        :raises RemoteProtocolError: it is not exactly what it says, or does not lie
            in the memory that we have mapped
        """
        manifest, places = unpack_mapped(body, mapped.nbytes, inline=not by_parts)
        sizes = manifest.layout.sizes
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
        :raises Unreadable: others here have views of it, and this process can map
            nothing more; or the GPU failed
        :raises ValueError: ``targets`` do not fit the entry
        """
        parts = delivery.mapped
        if self.reads_host:
            targets = on_host(targets)
        nbytes = 0
        if targets or self._is_charged:
            nbytes = delivery.own_nbytes(targets)
        if not self._is_charged:
            nbytes = _small_nbytes(delivery.manifest, parts, targets) if parts else 0
        if nbytes:
            is_copied_in_host = self.reads_host and not self.views
            await budget.reserve(nbytes, in_host=is_copied_in_host)
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
            specs, digests = manifest.layout.specs, manifest.digests
            every = zip(specs.items(), digests, parts.places, strict=True)
            for index, ((name, spec), digest, place) in enumerate(every, 1):
                if place is None:
                    piece = next(inline)
                    verify(name, digest, digest_of(piece))
                    job.take_inline(name, spec, piece)
                else:
                    job.add(name, spec, digest, place)
                if not index % _AT_A_TIME:
                    await asyncio.sleep(0)
            await job.run(self._pool, is_full=self.memory.digest == "full")
            return job.take()
        finally:
            job.take()  # an error's traceback would keep what is in it
            parts.release()

    def _file_for(self, parts: MappedParts) -> MappedFile:
        """Return a mapping that shows what the owner has there, to nobody else here.

        :raises Unreadable: this process can map nothing more
        """
        file = self.memory.file
        # The pin by no name of its own, that an error would keep.
        if parts.pin is not None and (claim := file.claim(parts.places)) is not None:
            parts.pin.claim = claim
            return file
        try:
            return file.again()
        except OSError as exc:
            raise Unreadable(
                f"memory of which there are views here cannot be mapped again: {exc}"
            ) from exc


def _small_nbytes(
    manifest: Manifest, parts: MappedParts, targets: Mapping[str, KVMemory]
) -> int:
    """Return how many bytes are copied for views: of tensors that share pages."""
    every = zip(manifest.layout.specs, parts.places, parts.sizes, strict=True)
    return sum(
        nbytes
        for name, place, nbytes in every
        if place is not None and nbytes < SHARED_PAGES_BELOW and name not in targets
    )


def _verify_edges(file: MappedFile, parts: MappedParts) -> None:
    found = edges_of(file.memory, parts.places, parts.sizes)
    if found != parts.edges:
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
        self._owners: list[str] = []  # which tensor each of these is a piece of
        self._scattered: list[CopyJob] = []
        self._digests = dict[str, bytes]()
        self._places: list[KVMemory] = []

    def take_inline(self, name: str, spec: TensorSpec, piece: memoryview) -> None:
        """Take a tensor whose few bytes rode along."""
        target = self._targets.get(name)
        if target is None:
            target = tensor_from(piece, spec)
        else:
            fill(memory_of(target), piece)
        self._tensors[name] = tensor_at(target)

    def add(self, name: str, spec: TensorSpec, digest: bytes, place: Place) -> None:
        """Show a tensor, or note what is to be copied for it."""
        target, nbytes = self._targets.get(name), spec.nbytes
        self._digests[name] = digest
        if target is None and self._views and self._lent is not None:
            if nbytes < SHARED_PAGES_BELOW:
                piece = b"".join(one.data for one in self._file.pieces(place, nbytes))
                target = tensor_from(piece, spec)
                self._places.append(target)
                self._tensors[name] = target
                return
            try:
                tensor = self._file.view(place, spec, nbytes, self._lent)
                if self._claim is not None and len(place.runs) == 1:
                    self._claim.exported += place.runs
                self._places.append(tensor)
                self._tensors[name] = tensor
                return
            except OSError:  # it lies apart, and the process has too many mappings
                pass
        target = self._empty(spec) if target is None else target
        self._places.append(target)
        self._tensors[name] = tensor_at(target)
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
            self._owners.append(name)
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
        if is_full and self._owners == list(self._digests):
            # While they are hot, where each tensor is copied in one piece.
            digests = await pool.copy(self._from, self._to)
        else:
            if self._from or self._scattered:
                copies = long_copies(self._from, self._to)
                await pool.run([*self._scattered, *copies])
                del copies  # they keep what they have copied
            if not is_full:
                return
            digests = await pool.digest(self._places)
        every = zip(self._digests.items(), digests, strict=True)
        for (name, digest), found in every:
            verify(name, digest, found)


class ExportedParts(MappedParts):
    """Where the parts of a stream will lie in ``memory``, but for those that ride."""

    memory: ImportedMemory
    pool: CopyPool

    def source(self, index: int) -> DeviceMemory:
        """Return a part's bytes; whoever has them keeps the memory of all parts."""
        place = self.places[index]
        if place is None or self.pin is None:
            raise ValueError(f"part {index} does not lie there, or was let go")
        return self.memory.imported.part(place, self.sizes[index], self.pin)


class IpcStreamRoute(ReadRoute):
    """Parts of a stream, once they lie where the peer has offered them."""

    def __init__(self, link: Link, parts: ExportedParts) -> None:
        super().__init__(link.progress, parts.memory.digest)
        self.pool = parts.pool
        self._parts = parts

    def stop(self, transfer: int) -> None:
        super().stop(transfer)
        self._parts.release()

    def _is_there(self, frame: Sent, nbytes: int) -> bool:
        if frame.offset is not None:
            raise RemoteProtocolError("sent from elsewhere, granted otherwise")
        return True

    def _read(
        self, frame: Sent, target: Memory | DeviceMemory, done: DoneCallback
    ) -> None:
        place = cast(DeviceMemory, target)  # nothing else was received
        copying = self._copy(self._parts.source(frame.part), place, done, frame)
        self._reading.own(copying, f"asynckv: read part {frame.part} of a stream")
        if not self._awaited:
            self._parts.release()  # only what is copied just now keeps the memory

    async def _copy(
        self,
        source: DeviceMemory | None,
        target: DeviceMemory,
        done: DoneCallback,
        frame: Sent,
    ) -> None:
        try:
            # No variable of the source: an error's traceback would keep it in use.
            places, source = [source] if source is not None else [], None
            copying = self.pool.copy(places, [target], digest=frame.kind == "full")
            del places
            with self.progress.working(frame.transfer):
                (digest,) = await copying
                if frame.kind == "edges":
                    (digest,) = await self.pool.edges([target])
        except Exception as exc:  # noqa: BLE001 - whoever waits is told
            clear_all_frames(exc)
            del target  # as there
            done(b"", exc if isinstance(exc, ChecksumError) else RouteLost(exc))
        else:
            error = None if digest == frame.digest else other_bytes(frame.part)
            done(digest, error)


class IpcReader(MapReader):
    """Reads what ``memory`` shows of a GPU, into tensors of this side's GPU.

    As its contract says, but of another GPU's memory there are copies alone. A call
    that is cancelled ends when the GPU is done too.
    """

    reads_host: ClassVar[bool] = False

    def __init__(self, memory: ImportedMemory, pool: CopyPool, *, views: bool) -> None:
        super().__init__(memory, pool, views=views and memory.imported.is_near)
        self._imported = memory

    def unpack(
        self, mapped: MappedOffer, body: bytes, *, by_parts: bool = False
    ) -> tuple[Manifest, MappedParts]:
        manifest, parts = super().unpack(mapped, body, by_parts=by_parts)
        if any(place is not None and len(place.runs) > 1 for place in parts.places):
            parts.release()  # the error would keep it, as long as somebody keeps that
            raise RemoteProtocolError("a tensor of a GPU in several places")
        return manifest, parts

    def unpack_parts(
        self, mapped: MappedOffer, body: bytes
    ) -> tuple[Manifest, ExportedParts]:
        """As :meth:`unpack`, of a stream: each part is read once it lies there.

        :raises RemoteProtocolError: as there, or parts that ride have a place
        """
        manifest, parts = self.unpack(mapped, body, by_parts=True)
        shown = ExportedParts(
            *(parts.places, parts.sizes, parts.edges, parts.pin),
            *(self._imported, self._pool),
        )
        parts.release()
        every = zip(shown.places, shown.sizes, strict=True)
        if any((size > EAGER_NBYTES) is (place is None) for place, size in every):
            shown.release()  # as there
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
        except GPUFailed as exc:
            why = str(exc)
            clear_all_frames(exc)  # they keep the peer's memory in use
            raise Unreadable(why) from None
        finally:
            sources.clear()  # an error's traceback would keep what is in it
            parts.release()

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
        reading = self._pool.edges(there)
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
        specs, digests = manifest.layout.specs, manifest.digests
        # No name for the zip: it would keep the last of the sources that it gave.
        for (name, spec), digest, source in zip(
            specs.items(), digests, sources, strict=True
        ):
            target = targets.get(name)
            if source is not None and target is None and self.views:
                over = self._imported.gpus.tensors.tensor_over
                tensors[name] = over(source, spec)
                shown.append(source)
                continue
            copies.add(name)
            if source is None:
                piece = next(inline)
                verify(name, digest, digest_of(piece))
                origins.append(tensor_from(piece, spec))
            else:
                origins.append(source)
            place = self._pool.empty(spec) if target is None else target
            places.append(place)
            tensors[name] = tensor_at(place)
        is_full = self.memory.digest == "full"
        copying = self._pool.copy(origins, places, digest=is_full)
        # An error's traceback would keep the peer's memory in use.
        source, origins = None, []
        try:
            copied = iter(await copying)
            if is_full:
                found = iter(await self._pool.digest(shown))
                for name, digest in zip(specs, digests, strict=True):
                    is_copy = name in copies
                    verify(name, digest, next(copied) if is_copy else next(found))
        except BaseException:
            tensors.clear()
            raise
        finally:
            shown.clear()
        return tensors
