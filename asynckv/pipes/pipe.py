"""The pipe: tensors in, tensors out, each in the order of the calls."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from types import TracebackType
from typing import Final

import torch

from asynckv.abc import KVPipe
from asynckv.affinity import LoopBound
from asynckv.devices.copying import CopyPool
from asynckv.devices.opening import OpenDevice
from asynckv.devices.tensors import KVOnGpu
from asynckv.errors import ChecksumError, EndOfStream, PeerLost, PipeBroken
from asynckv.pipes.arrivals import Arrival, SmallArrival
from asynckv.pipes.end import PipeEnd
from asynckv.pipes.gpu_side import Placement
from asynckv.pipes.outbound import INLINE_NBYTES, Parcel
from asynckv.protocol.wire import digest_of
from asynckv.tensors.views import bytes_of, check_into, packed, spec_like, spec_of
from asynckv.transfers.source import HostSource, Source, StagedTensor
from asynckv.types import TensorSpec

__all__ = (
    "Pipe",
    "PipeStatistics",
    "ReportedErrors",
)


class ReportedErrors:
    """That the peer is lost, and that something sent may not have arrived."""

    def __init__(self) -> None:
        self._loss = self._broken = False

    def note(self, error: BaseException) -> None:
        """The application is about to hear of it."""
        self._loss |= isinstance(error, PeerLost | ChecksumError)
        self._broken |= isinstance(error, PipeBroken)

    def note_all(self) -> None:
        """It has hung up: there is nothing to tell it."""
        self._loss = self._broken = True

    def has(self, error: PipeBroken) -> bool:
        """Whether the application has heard of it; from now on it has."""
        knew = self._broken or (self._loss and not error.maybe_delivered)
        self.note(error)
        return knew


_DRAIN_S: Final = 30.0
_CALLS_A_TICK: Final = 32


@dataclasses.dataclass(frozen=True)
class PipeStatistics:
    """What went through a pipe, and what is in it now.

    ``in_flight`` is copied and not known to be in the peer's memory; ``held``
    was announced by the peer and not taken yet. ``room_waits`` counts the sends
    that found the pipe full, ``waiting_senders`` those that wait now.
    """

    max_bytes: int
    sent_bytes: int
    sent_tensors: int
    received_bytes: int
    received_tensors: int
    in_flight_bytes: int
    in_flight_tensors: int
    held_bytes: int
    held_tensors: int
    room_waits: int
    waiting_senders: int


class Pipe(KVPipe, LoopBound):
    """Sends through one end and receives through one, usually the same.

    What it receives is on ``device`` whatever it was sent from, in CPU memory
    without one. ``into=`` is where the caller says.

    Left by ``async with`` after an error it is aborted: the peer must not take
    what it has received for the whole stream.
    """

    def __init__(
        self, sends: PipeEnd, receives: PipeEnd, device: OpenDevice | None = None
    ) -> None:
        self._check_loop()  # it is the link's, whoever calls first
        self._ends = (sends,) if sends is receives else (sends, receives)
        self._link = sends.link
        self._outbound = sends.outbound
        self._inbound = receives.inbound
        self._pool = CopyPool() if device is None else device.make_pool()
        self._sends, self._receives = sends, receives
        self._placing = None
        if device is not None:
            self._placing = Placement(device, self._pool, lambda: receives.gpus)
        self._turn_to_receive = asyncio.Lock()
        self._calls = 0
        self._told = ReportedErrors()

    def __repr__(self) -> str:
        return f"<Pipe over {self._link!r}>"

    @property
    def peer(self) -> str:
        """The peer's id."""
        return self._link.peer.id

    @property
    def transport(self) -> str:
        """How payload moves now: ``"inline"``, ``"map"``, ``"mem"``, ``"cuda_ipc"``, or
        ``"nccl"``.

        What is longer than 64 KiB is read in the sender's memory by ``"map"``, or in
        that of its GPU by ``"cuda_ipc"``; by ``"nccl"`` it goes from GPU to GPU.
        """
        return self._link.transport_name

    async def gpus_settled(self) -> None:
        """Wait until the way to the peer's GPU is open, or is known not to be.

        That is bounded once the peer has accepted the pipe. :attr:`transport` says
        which it is. A cancelled call leaves no trace.
        """
        self._check_loop()
        if (gpus := self._sends.gpus) is not None:
            await gpus.opening.settled()

    def statistics(self) -> PipeStatistics:
        """Return what went through and what is in it now. Never waits."""
        outbound, inbound = self._outbound, self._inbound
        room = outbound.room
        return PipeStatistics(
            max_bytes=room.max_bytes,
            sent_bytes=outbound.sent_bytes,
            sent_tensors=outbound.sent_tensors,
            received_bytes=inbound.received_bytes,
            received_tensors=inbound.received_tensors,
            in_flight_bytes=room.used_bytes,
            in_flight_tensors=room.used_tensors,
            held_bytes=inbound.held_bytes,
            held_tensors=inbound.held_tensors,
            room_waits=room.waits,
            waiting_senders=len(room),
        )

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As the contract says: host memory, also where the pipe has a ``device``.

        All that live have up to ``max_bytes``. A tensor that is sent while its bytes of
        before are still on their way goes by sockets, also on one host.
        """
        self._check_loop()
        return self._outbound.empty(spec_like(shape, dtype))

    async def send_tensor(self, tensor: torch.Tensor | None, copy: bool = True) -> None:
        """As the contract says. With ``copy=False`` a dense tensor of host memory that
        is longer than 64 KiB is not copied, but over ``mem://`` and by ``"map"``.
        """
        self._check_loop()
        if not isinstance(tensor, torch.Tensor | None):
            raise TypeError(f"a pipe sends tensors and None, not {tensor!r:.80}")
        gives_way = self._is_time_for_others()
        if not gives_way and self._sent_at_once(tensor):
            return
        parcel = Parcel(None if tensor is None else spec_of(tensor))
        source = self._pool.catch(tensor)
        try:
            await self._outbound.reserve(parcel)
            if gives_way:  # now that it has its place before those who call meanwhile
                await asyncio.sleep(0)
            if source is None or parcel.spec is None:
                self._outbound.put(parcel, None)
            else:
                copied = await self._copied(source, parcel, parcel.spec, copy=copy)
                self._outbound.put(parcel, copied)
        except BaseException as exc:
            self._outbound.drop(parcel)
            self._told.note(exc)
            raise

    async def flush(self) -> None:
        """As the contract says; a tensor above the peer's bound is in its memory
        once its ``recv_tensor`` waits for it.
        """
        self._check_loop()
        try:
            await self._outbound.flush()
        except PipeBroken as exc:
            self._told.note(exc)
            await self._outbound.quiesce()
            raise
        except BaseException:
            if self._outbound.is_reading_borrowed:
                self._sends.abort(PeerLost("a flush was cancelled: see send_tensor()"))
                await self._outbound.quiesce()
            raise

    async def recv_tensor(
        self, into: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        self._check_loop()
        try:
            await self._turn_to_receive.acquire()
            try:
                if self._is_time_for_others():
                    await asyncio.sleep(0)
                arrival = await self._inbound.head(into)
                while into is not None and not arrival.is_verified:
                    if await self._inbound.read(arrival, into):
                        self._inbound.take(arrival)
                        return into
                    arrival = await self._inbound.head(into)
                if into is None and self._placing is None and arrival.region is None:
                    received = self._inbound.tensor_of(arrival)
                else:
                    received = await self._landed(arrival, into)
                self._inbound.take(arrival)
                return received
            finally:
                self._turn_to_receive.release()
        except (PeerLost, ChecksumError) as exc:
            self._told.note(exc)
            raise

    async def __anext__(self) -> torch.Tensor | None:
        try:
            return await self.recv_tensor()
        except EndOfStream:
            raise StopAsyncIteration from None

    async def aclose(self) -> None:
        """Flush for at most 30 s, say goodbye, hang up. May be called again.

        What the peer sends meanwhile is not received. A call that is cancelled
        while it flushes aborts the pipe.

        :raises PipeBroken: something sent did not arrive, or the peer is lost
            and nobody was told yet
        """
        self._check_loop()
        self._outbound.refuse()
        try:
            await self._drain()
        except PipeBroken as exc:
            if not self._told.has(exc):
                raise
        except BaseException:
            self.abort()
            raise
        finally:
            self._pool.close()
            await self._close_ends()

    def abort(self) -> None:
        self._told.note_all()
        self._hang_up()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is not None:
            self.abort()
        await self.aclose()

    async def _close_ends(self) -> None:
        try:
            for end in self._ends:
                await end.aclose()
        except BaseException:
            self._hang_up()
            raise

    def _hang_up(self) -> None:
        for end in self._ends:
            end.abort()
        self._pool.close()

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(_DRAIN_S):
                await self._outbound.flush()
        except TimeoutError:
            left = self._outbound.room.used_tensors
            self._hang_up()
            raise PipeBroken(
                f"the peer has not received everything within {_DRAIN_S:g} s",
                maybe_delivered=left,
                hint="await flush() first: it waits for as long as it takes",
            ) from None

    async def _copied(
        self,
        source: torch.Tensor | KVOnGpu,
        parcel: Parcel,
        spec: TensorSpec,
        *,
        copy: bool,
    ) -> Source:
        """Return what of a tensor can be sent later: a copy, unless none is needed."""
        self._outbound.check()
        if staged := await self._staged(source, parcel):
            return staged
        is_digested = self._outbound.digests(parcel.nbytes)
        if isinstance(source, torch.Tensor) and parcel.nbytes > INLINE_NBYTES:
            if (region := self._outbound.region_of(source)) is not None:
                digest = b""  # lanes make it as they send
                if is_digested and self._sends.is_mapped:
                    (digest,) = await self._pool.digest([source])
                return HostSource(source.detach(), digest, region)
            if not copy and self._can_borrow(source):
                parcel.is_borrowed = True
                return HostSource(source)
        memory, region = await self._outbound.memory_for(spec)
        self._outbound.check()
        (digest,) = await self._pool.copy([source], [memory], digest=is_digested)
        return HostSource(memory, digest, region)

    def _can_borrow(self, tensor: torch.Tensor) -> bool:
        if self._sends.is_mapped or not self._link.payload.can_block_until_quiet:
            return False
        try:
            bytes_of(tensor)
        except ValueError:  # its elements are not in order
            return False
        return True

    async def _staged(
        self, source: torch.Tensor | KVOnGpu, parcel: Parcel
    ) -> StagedTensor | None:
        """Return a copy that is on the GPU, where something leads on from there."""
        gpus = self._sends.gpus
        if gpus is None or parcel.nbytes <= INLINE_NBYTES:
            return None
        return await gpus.staged(source)

    async def _landed(
        self, arrival: Arrival | SmallArrival, into: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return what has arrived where it is wanted; it stays in the stream."""
        placing, gpus = self._placing, self._receives.gpus
        if arrival.region is not None and arrival.spec is not None and gpus is not None:
            if into is not None:
                check_into(into, arrival.spec, "tensor")
            return await gpus.taken(arrival.region, arrival.spec, into)
        tensor = self._inbound.tensor_of(arrival)
        if tensor is None or arrival.spec is None:
            return tensor
        if into is not None:
            check_into(into, arrival.spec, "tensor")
            await self._pool.copy([tensor], [into], digest=False)
            return into
        if placing is None:
            return tensor
        return await placing.place(tensor, lambda: self._inbound.check(arrival))

    def _sent_at_once(self, tensor: torch.Tensor | None) -> bool:
        """Send what is small and need not wait for anything; else ``False``."""
        if tensor is None:
            return self._outbound.send_small(None, b"", b"")
        small = packed(tensor, INLINE_NBYTES)
        if small is None:
            return False
        spec, body = small
        digest = digest_of(body) if self._link.digest != "off" else b""
        return self._outbound.send_small(spec, body, digest)

    def _is_time_for_others(self) -> bool:
        # Small tensors need not wait for anything: a loop over them would keep
        # the event loop for itself.
        self._calls += 1
        return not self._calls % _CALLS_A_TICK
