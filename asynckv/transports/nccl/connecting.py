"""Both pipes of a transport are opened, once, by both sides in turn.

Each side first judges what the other says of its NCCL. Versions that differ are refused
by NCCL itself. Of the variables only those are compared that decide how bytes are cut,
framed and carried: where they differ, NCCL hangs. Devices, interfaces, topology,
logging and allocation are each host's own.

One side leads: the one whose worker has the lower token. It asks for the other's worker
when it has its own, so workers that are shared are taken in one order everywhere, and
nobody waits in a circle. A pipe that ends, for whatever reason, ends the transport. On
the loop only.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Annotated, Final

import msgspec

from asynckv.errors import AsyncKVError, IncompatiblePeer, PeerLost, RemoteProtocolError
from asynckv.protocol.transfer_frames import (
    DeviceMet,
    DeviceReady,
    MeetDevice,
    PrepareDevice,
)
from asynckv.protocol.values import Count, Id
from asynckv.protocol.wire import digest_of
from asynckv.transports.nccl.api import UNIQUE_ID_NBYTES
from asynckv.transports.nccl.directions import Direction
from asynckv.transports.nccl.worker_pipes import PipeEnd, WorkerPipe
from asynckv.transports.parts import call_on

__all__ = (
    "Connector",
    "DeviceDescription",
    "check_peer",
    "nccl_environment_digest",
)


_MUST_AGREE: Final = (
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_NTHREADS"),
    *("NCCL_BUFFSIZE", "NCCL_LL_BUFFSIZE", "NCCL_LL128_BUFFSIZE"),
    *("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_NCHANNELS_PER_NET_PEER"),
    *("NCCL_MIN_P2P_NCHANNELS", "NCCL_MAX_P2P_NCHANNELS"),
    *("NCCL_MIN_CTAS", "NCCL_MAX_CTAS"),
    *("NCCL_P2P_NET_CHUNKSIZE", "NCCL_P2P_NVL_CHUNKSIZE", "NCCL_P2P_PCI_CHUNKSIZE"),
    *("NCCL_P2P_LL_THRESHOLD", "NCCL_ALLOC_P2P_NET_LL_BUFFERS"),
    *("NCCL_NET", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE"),
    *("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_P2P_DIRECT_DISABLE"),
    *("NCCL_PXN_DISABLE", "NCCL_P2P_PXN_LEVEL", "NCCL_MULTI_RANK_GPU_ENABLE"),
)


class DeviceDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One side's GPU and NCCL. ``token`` is its worker's, for the order of turns."""

    uuid: Id
    nccl_version: Count
    environment: Annotated[bytes, msgspec.Meta(max_length=16)]
    token: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
    chunk_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**40)]

    def encode(self) -> bytes:
        """Return what the peer is sent."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> DeviceDescription:
        """Return what a peer has sent.

        :raises RemoteProtocolError: it is no description
        """
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as exc:
            raise RemoteProtocolError(f"no description of a GPU: {exc}") from exc


def nccl_environment_digest(environment: Mapping[str, str] | None = None) -> bytes:
    """Digest the ``NCCL_*`` variables that both sides must have alike."""
    found = os.environ if environment is None else environment
    lines = [f"{name}={found[name]}" for name in _MUST_AGREE if name in found]
    return digest_of("\n".join(lines).encode())


def check_peer(own: DeviceDescription, peer: DeviceDescription) -> None:
    """Refuse a peer whose NCCL this one's would hang with.

    :raises IncompatiblePeer: ``field`` says what differs, or does not
    """
    if own.nccl_version != peer.nccl_version:
        raise IncompatiblePeer(
            f"NCCL {own.nccl_version} here, {peer.nccl_version} there",
            field="nccl_version",
            hint="install the same nvidia-nccl package on both sides",
        )
    if own.environment != peer.environment:
        raise IncompatiblePeer(
            "the NCCL_* variables of both sides differ",
            field="nccl_environment",
            hint="NCCL would hang: set these alike, or on neither side: "
            + ", ".join(_MUST_AGREE),
        )
    if own.uuid == peer.uuid:
        raise IncompatiblePeer(
            "both sides have the same GPU, which NCCL refuses",
            field="gpu",
            hint="cuda_ipc is for that",
        )
    if own.token == peer.token:
        raise IncompatiblePeer("a worker cannot wait for itself", field="token")


@dataclasses.dataclass(slots=True)
class _Pipe:
    """``of_worker`` until nothing of it moves on this side any more."""

    of_worker: WorkerPipe | None = None
    is_begun: bool = False
    has_met: bool = False
    peer_has_met: bool = False

    @property
    def is_open(self) -> bool:
        return self.has_met and self.peer_has_met


class Connector:
    """Opens and ends both pipes: of who sends, and of who receives here.

    ``lose(error)`` is called when a pipe cannot be opened, or has ended by itself;
    ``changed()`` when one is open, or over.
    """

    def __init__(
        self,
        sender: Direction,
        receiver: Direction,
        *,
        lose: Callable[[Exception], None],
        changed: Callable[[], None],
    ) -> None:
        self._worker = sender.worker
        self._loop = sender.loop
        self._say = sender.say
        self._lose = lose
        self._changed = changed
        self._users = (sender, receiver)
        self._leads = False
        self._pipes = (_Pipe(), _Pipe())
        self._turn: Callable[[], None] | None = None
        self._is_prepared = False
        """Whether both workers were asked for."""
        self._is_ready = False
        """Whether this side's worker and the peer's are there for each other."""
        self._is_over = False

    @property
    def is_open(self) -> bool:
        """Whether both pipes are."""
        return all(pipe.is_open for pipe in self._pipes)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing moves by either pipe on this side."""
        return all(pipe.of_worker is None for pipe in self._pipes)

    def start(self, *, leads: bool) -> None:
        """Open them, if this side leads; else the peer will."""
        self._leads = leads
        if leads:
            self._ask_turn(self._prepare)
        else:  # pipe 0 is the leader's to send
            self._users = self._users[::-1]

    def abort(self, error: Exception) -> None:
        """Abort both pipes."""
        self._end()
        for pipe in self._pipes:
            if pipe.of_worker is not None:
                self._worker.abort(pipe.of_worker, error)

    def close(self) -> None:
        """End both pipes cleanly: no operation is left."""
        self._end()
        for pipe in self._pipes:
            if pipe.of_worker is not None and pipe.is_open:
                self._worker.close(pipe.of_worker)
            elif pipe.of_worker is not None:
                lost = PeerLost("the transport was closed")
                self._worker.abort(pipe.of_worker, lost)

    def on_prepare(self) -> None:
        """The leader has its worker: take this one's turn too.

        :raises RemoteProtocolError: this side leads, or was asked already
        """
        if self._leads or self._is_prepared:
            raise RemoteProtocolError("a PrepareDevice that makes no sense")
        self._is_prepared = True
        self._ask_turn(self._get_ready)

    def on_ready(self) -> None:
        """The peer has its worker too: meet.

        :raises RemoteProtocolError: it was not asked, or has answered already
        """
        if not self._leads or not self._is_prepared or self._is_ready:
            raise RemoteProtocolError("a DeviceReady that makes no sense")
        self._is_ready = True
        self._mint(0)

    def on_meet(self, frame: MeetDevice) -> None:
        """The leader opens this pipe now: so does this side.

        :raises RemoteProtocolError: it is not to be opened
        """
        is_due = self._is_ready and not self._pipes[frame.pipe].is_begun
        if self._leads or not is_due or len(frame.unique_id) != UNIQUE_ID_NBYTES:
            raise RemoteProtocolError("a MeetDevice that makes no sense")
        self._meet(frame.pipe, frame.unique_id)

    def on_met(self, frame: DeviceMet) -> None:
        """The peer is there.

        :raises RemoteProtocolError: it was not asked to, or has said so before
        """
        pipe = self._pipes[frame.pipe]
        if not pipe.is_begun or pipe.peer_has_met:
            raise RemoteProtocolError("a DeviceMet that makes no sense")
        pipe.peer_has_met = True
        self._use_if_open(frame.pipe)

    def _ask_turn(self, begin: Callable[[], None]) -> None:
        def have_turn() -> None:
            if self._turn is None or self._is_over:
                return
            if (why_not := self._worker.why_not) is not None:
                self._lose(why_not)  # else the peer's worker would wait for this one
            else:
                begin()

        self._turn = functools.partial(call_on, self._loop, have_turn)
        self._worker.turns.ask(self._turn)

    def _prepare(self) -> None:
        self._is_prepared = True
        self._say(PrepareDevice())

    def _get_ready(self) -> None:
        self._is_ready = True
        self._say(DeviceReady())

    def _mint(self, index: int) -> None:
        """Make a unique id, and let the peer have it: nobody else ever does.

        One pipe after the other: both sides meet in one order.
        """

        def mint() -> None:
            try:
                unique_id = self._worker.nccl.unique_id()
            except Exception as exc:  # noqa: BLE001 - told on the loop
                call_on(self._loop, self._lose, _lost_by(exc))
            else:
                call_on(self._loop, minted, unique_id)

        def minted(unique_id: bytes) -> None:
            if not self._is_over:
                self._say(MeetDevice(index, unique_id))
                self._meet(index, unique_id)

        self._worker.run(mint)

    def _meet(self, index: int, unique_id: bytes) -> None:
        def opened() -> None:
            call_on(self._loop, self._met, index)

        def lost(error: Exception) -> None:
            call_on(self._loop, self._lost, index, error)

        end: PipeEnd = "send" if (index == 0) == self._leads else "receive"
        pipe = WorkerPipe(
            *(self._worker.cuda, self._worker.nccl, end), opened=opened, lost=lost
        )
        self._pipes[index].is_begun = True
        self._pipes[index].of_worker = pipe
        self._worker.open(pipe, unique_id)

    def _met(self, index: int) -> None:
        if not self._is_over:
            self._say(DeviceMet(index))
            self._pipes[index].has_met = True
            self._use_if_open(index)

    def _use_if_open(self, index: int) -> None:
        pipe = self._pipes[index]
        if self._is_over or not pipe.is_open or pipe.of_worker is None:
            return
        self._users[index].open(pipe.of_worker)
        if self.is_open:
            self._end_turn()
        elif self._leads:
            self._mint(1)  # not before: who fails by then keeps no peer waiting
        self._changed()

    def _lost(self, index: int, error: Exception) -> None:
        """Nothing of it moves any more, or the worker was given up."""
        self._pipes[index].of_worker = None
        if self._worker.error is not None:
            self._lose(self._worker.error)
        elif not self._is_over:
            self._lose(_lost_by(error))
        if self._is_over and self.is_quiet:
            self._end_turn()
        self._changed()

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            self._worker.turns.end(turn)

    def _end(self) -> None:
        self._is_over = True
        if self.is_quiet:  # else the worker may still be kept by what it opens
            self._end_turn()
        for user in self._users:
            user.close()


def _lost_by(error: Exception) -> Exception:
    if isinstance(error, PeerLost):
        return error
    lost = PeerLost(f"what connects both GPUs has failed: {error}")
    lost.__cause__ = error if isinstance(error, AsyncKVError) else None
    return lost
