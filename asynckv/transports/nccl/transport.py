"""Payload from GPU to GPU by NCCL, agreed on operation by operation.

Both directions have a communicator of their own, and an end on this side that is made
with what both sides have agreed on. Nothing is posted before the peer has granted it,
and what is granted is posted by both: it ends, or both sides abort their communicators
and the transport is over, for as long as its link lives. Memory is read and written
where it lies, without a digest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ClassVar, Final, Protocol, runtime_checkable

from asynckv.abc import PayloadTransport
from asynckv.devices.cuda import DeviceMemory
from asynckv.errors import LocalProtocolError, PeerLost, RemoteProtocolError
from asynckv.protocol.transfer_frames import (
    DeviceDone,
    DeviceFrame,
    DeviceGrant,
    DeviceMet,
    DeviceOffer,
    DeviceReady,
    DevicesFinish,
    DeviceSkip,
    DeviceWithdraw,
    MeetDevice,
    PrepareDevice,
)
from asynckv.tensors.runs import Memory
from asynckv.transports.nccl.connecting import (
    Connector,
    DeviceDescription,
    check_peer,
    nccl_environment_digest,
)
from asynckv.transports.nccl.directions import (
    DevicePart,
    NcclSettings,
    Receiver,
    Sender,
)
from asynckv.transports.nccl.worker import DeviceWorker
from asynckv.transports.parts import DoneCallback
from asynckv.transports.quiesce import Ending, QuiesceWaits
from asynckv.waits.waiting import Waits

__all__ = (
    "DeviceChannel",
    "NcclTransport",
)


@runtime_checkable
class DeviceChannel(Protocol):
    """Frames to and from the peer's transport: whole, in order, authenticated.

    Unique ids go over it, so it is the control link and nothing less. On the loop only;
    nothing waits.
    """

    def send(self, frame: DeviceFrame) -> None:
        """Queue a frame; nothing happens if the channel is over."""

    def attach(
        self,
        hear: Callable[[DeviceFrame], None],
        lost: Callable[[Exception], None],
    ) -> None:
        """From here on call ``hear`` for each frame, those that came before first.

        An :exc:`~asynckv.errors.RemoteProtocolError` of it breaks the link. ``lost`` is
        called once, if the channel ends before it is detached.
        """

    def detach(self) -> None:
        """Call nobody any more."""


_CLOSE_S: Final = 1.0
_WATCH_S: Final = 0.5


class NcclTransport(PayloadTransport):
    """Both directions between this GPU and a peer's.

    ``side_channel`` of :meth:`open` is a
    :class:`~asynckv.transports.nccl.transport.DeviceChannel`. ``source`` and ``target``
    are :class:`~asynckv.devices.cuda.DeviceMemory` of the worker's GPU; it belongs
    to the transfer until it is quiet. ``on_lost`` and ``done`` are called as
    :class:`~asynckv.transports.inline.InlineTransport` calls them, but with no digest;
    ``on_peer_finished`` when the peer has closed its side and nothing was under way,
    which is no loss.

    A transfer that is stopped withdraws what was not granted. What is granted cannot
    be cancelled: it has 1 s to end by itself, then the transport is lost;
    :meth:`quiesce` returns when its events have fired or the worker is given up.
    """

    name: ClassVar[str] = "nccl"

    def __init__(
        self,
        worker: DeviceWorker,
        loop: asyncio.AbstractEventLoop,
        on_lost: Callable[[Exception], None],
        settings: NcclSettings | None = None,
        on_peer_finished: Callable[[], None] = lambda: None,
    ) -> None:
        self._worker = worker
        self._loop = loop
        self._on_peer_finished = on_peer_finished
        self._settings = settings or NcclSettings()
        self._own = DeviceDescription(
            worker.uuid,
            worker.nccl_version,
            nccl_environment_digest(),
            worker.token,
            self._settings.chunk_bytes,
        )
        self._channel: DeviceChannel | None = None
        self._is_open = False
        self._peer_has_finished = False
        self._has_finished = False
        self._waits = Waits(loop)
        self._quiet = QuiesceWaits(loop, self._is_touched)
        self._watch: asyncio.TimerHandle | None = None
        self._ending = Ending(
            loop,
            on_lost,
            hang_up=self._hang_up,
            is_touching=self._is_touching,
            take_left=self._take_left,
        )
        shared = worker, loop, self._settings
        self.sender = Sender(*shared, self._say, self._settle)
        self.receiver = Receiver(*shared, self._say, self._settle)
        self._connector = Connector(
            *(self.sender, self.receiver),
            lose=self._ending.lose,
            changed=self._settle,
        )

    @property
    def health(self) -> str:
        """``"ok"``, or what is wrong with the GPU's worker."""
        return self._worker.health

    @property
    def is_quiet(self) -> bool:
        """Whether it has ended, and nothing of it is at the GPU any more."""
        return (
            self._ending.error is not None
            and self._worker.error is None
            and not self._is_touching()
        )

    def describe(self) -> bytes:
        return self._own.encode()

    async def open(self, peer_description: bytes, side_channel: object) -> None:
        """Open both pipes with the peer, which does the same. Cancelled, it has ended.

        :raises IncompatiblePeer: its NCCL or its GPU does not go with this one
        :raises GPUFailed: the worker of its GPU was given up
        :raises PeerLost: they cannot be opened
        :raises TimeoutError: they were not open in time
        """
        peer = DeviceDescription.decode(peer_description)
        check_peer(self._own, peer)
        if not isinstance(side_channel, DeviceChannel):
            raise LocalProtocolError("an nccl transport opens on a device channel")
        if (error := self._ending.error or self._worker.error) is not None:
            raise error
        try:
            async with asyncio.timeout(self._settings.open_s):
                await self._connect(side_channel, peer)
        except BaseException as exc:
            cancelled = PeerLost("the opening of the payload transport was cancelled")
            self._ending.end(exc if isinstance(exc, Exception) else cancelled)
            raise

    def send(
        self,
        transfer: int,
        part: int,
        source: Memory | DeviceMemory,
        done: DoneCallback,
        *,
        digest: bytes | None = None,
    ) -> None:
        self.sender.send(self._part(transfer, part, source, done))
        self._settle_if_over()

    def receive(
        self,
        transfer: int,
        part: int,
        target: Memory | DeviceMemory,
        done: DoneCallback,
    ) -> None:
        """As the contract says.

        :raises LocalProtocolError: the part is waited for already, or the transport is
            not open yet
        :raises TypeError: ``target`` is memory of the host
        """
        self.receiver.receive(self._part(transfer, part, target, done))
        self._settle_if_over()

    def announce(self, transfer: int) -> None:
        self.receiver.arrivals.announce(transfer)

    def landed_bytes(self, transfer: int) -> int:
        return self.receiver.arrivals.landed_bytes(transfer)

    def stop(self, transfer: int) -> None:
        self.sender.stop(transfer)
        self.receiver.stop(transfer)

    async def quiesce(self, transfer: int) -> None:
        self.stop(transfer)

        def give_up() -> None:
            if self._is_touched(transfer):
                lost = PeerLost("what a cancelled transfer had begun did not end")
                self._ending.lose(lost)

        await self._quiet.wait(transfer, give_up)

    async def aclose(self) -> None:
        """As the contract says: 1 s for queued parts, 1 s for the peer, 1 s to end."""
        try:
            if self._ending.error is None and self._channel is not None:
                await self._wait(lambda: not self.sender)
                self._finish()
                await self._wait(lambda: self._peer_has_finished)
        finally:
            self.abort()
            await self._ending.wait(_CLOSE_S)

    def abort(self) -> None:
        """End now. Never waits; the worker lets go within a moment."""
        self._ending.end(PeerLost("the payload transport was closed on this side"))

    async def _connect(self, channel: DeviceChannel, peer: DeviceDescription) -> None:
        self.sender.chunk_bytes = min(self._settings.chunk_bytes, peer.chunk_bytes)
        self._channel = channel
        self._watch = self._loop.call_later(_WATCH_S, self._check)
        channel.attach(self._receive, self._ending.lose)
        self._connector.start(leads=self._own.token < peer.token)
        await self._wait(lambda: self._connector.is_open, timeout_s=None)
        if self._ending.error is not None:
            raise self._ending.error
        self._is_open = True

    def _part(
        self,
        transfer: int,
        number: int,
        memory: Memory | DeviceMemory,
        done: DoneCallback,
    ) -> DevicePart:
        if not isinstance(memory, DeviceMemory):
            raise TypeError("memory of the host does not go by NCCL")
        if not self._is_open:
            raise LocalProtocolError("the payload transport is not open yet")
        return DevicePart(transfer, number, memory, done)

    def _settle_if_over(self) -> None:
        """Who comes when the transport or its peer has ended is told so."""
        if self._ending.error is not None:
            self._ending.settle_soon()
        elif self._peer_has_finished:
            lost = PeerLost("the peer has closed its side")
            self._loop.call_soon(self._ending.lose, lost)

    def _say(self, frame: DeviceFrame) -> None:
        if self._channel is not None:
            self._channel.send(frame)

    def _receive(self, frame: DeviceFrame) -> None:
        if self._ending.error is None:
            try:
                self._handle(frame)
            except RemoteProtocolError as exc:
                self._ending.lose(exc)

    def _handle(self, frame: DeviceFrame) -> None:
        match frame:
            case DeviceOffer():
                self.receiver.on_offer(frame)
            case DeviceGrant():
                self.sender.on_grant(frame)
            case DeviceDone():
                self.sender.on_done(frame)
            case DeviceSkip():
                self.sender.on_skip(frame)
            case DeviceWithdraw():
                self.receiver.on_withdraw(frame)
            case PrepareDevice():
                self._connector.on_prepare()
            case DeviceReady():
                self._connector.on_ready()
            case MeetDevice():
                self._connector.on_meet(frame)
            case DeviceMet():
                self._connector.on_met(frame)
            case DevicesFinish():
                self._peer_finished()
            case _:
                raise RemoteProtocolError(f"{type(frame).__name__} makes no sense here")

    def _peer_finished(self) -> None:
        self._peer_has_finished = True
        lost = PeerLost("the peer closed its side")
        if self._has_finished:
            self.sender.close()
            self._settle()
        elif self.sender or self.receiver or not self._connector.is_open:
            self._ending.lose(lost)
        else:
            self._finish()
            self._end_pipes(lost)
            self._on_peer_finished()

    def _finish(self) -> None:
        """Say that nothing more is offered, once."""
        if not self._has_finished:
            self._has_finished = True
            self._say(DevicesFinish())

    def _check(self) -> None:
        """Look now and then whether the worker is stuck, until nothing is left."""
        self._worker.check()
        if (why_not := self._worker.why_not) is not None:
            self._ending.lose(why_not)
        if self._ending.error is None or self._is_touching():
            self._watch = self._loop.call_later(_WATCH_S, self._check)
        self._settle()

    def _is_touched(self, transfer: int) -> bool:
        if self._worker.error is not None:
            return False  # given up: what it may touch is kept by the worker
        sent, received = self.sender, self.receiver
        return sent.is_touched(transfer) or received.is_touched(transfer)

    def _is_touching(self) -> bool:
        is_left = self._is_busy() or not self._connector.is_quiet
        return is_left and self._worker.error is None

    async def _wait(
        self, is_over: Callable[[], bool], *, timeout_s: float | None = _CLOSE_S
    ) -> None:
        """Wait until it is over, or the transport is."""

        def is_any_over() -> bool:
            return self._ending.error is not None or is_over()

        await self._waits.wait(is_any_over, timeout_s=timeout_s)

    def _settle(self) -> None:
        """Something has ended: tell whoever waits for that."""
        self._quiet.settle()
        self._ending.settle()
        self._waits.settle()
        is_over = self._ending.error is not None and not self._is_touching()
        if is_over and self._watch is not None:
            self._watch.cancel()

    def _hang_up(self) -> None:
        self._end_pipes(PeerLost("the payload transport has ended"))
        self._finish()
        if self._channel is not None:
            self._channel.detach()
        self._loop.call_soon(self._settle)

    def _end_pipes(self, error: Exception) -> None:
        """End them cleanly, if both sides have done all that was granted.

        What was stopped may still be under way, and the peer may never post it.
        """
        if self._peer_has_finished and not self._is_busy():
            self._connector.close()
        else:
            self._connector.abort(error)

    def _is_busy(self) -> bool:
        return self.sender.is_busy or self.receiver.is_busy

    def _take_left(self) -> list[DevicePart]:
        return [*self.sender.take_all(), *self.receiver.take_all()]
