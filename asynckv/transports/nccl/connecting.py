"""Both pipes of a transport are opened, once, by both sides in turn.

One side leads: the one whose worker has the lower token. It asks for the other's worker
when it has its own, so workers that are shared are taken in one order everywhere, and
nobody waits in a circle. A pipe that ends, for whatever reason, ends the transport. On
the loop only.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Protocol

from asynckv.errors import AsyncKVError, GPUFailed, PeerLost, RemoteProtocolError
from asynckv.protocol.transfer_frames import (
    DeviceFrame,
    DeviceMet,
    DeviceReady,
    MeetDevice,
    PrepareDevice,
)
from asynckv.tensors.cuda import DeviceMemory
from asynckv.transports.nccl.api import UNIQUE_ID_NBYTES
from asynckv.transports.nccl.parts import call_on
from asynckv.transports.nccl.worker import DeviceWorker, Turn
from asynckv.transports.nccl.worker_pipes import PipeEnd, WorkerPipe

__all__ = (
    "Connector",
    "PipeUser",
    "Staging",
)


class PipeUser(Protocol):
    """Whoever sends or receives by a pipe."""

    def open(self, pipe: WorkerPipe) -> None:
        """It is open."""

    def close(self) -> None:
        """It is not open any more."""


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
    """Opens and ends both pipes. ``users`` are who sends and who receives here.

    ``lose(error)`` is called when a pipe cannot be opened, or has ended by itself;
    ``changed()`` when one is open, or over.
    """

    def __init__(
        self,
        worker: DeviceWorker,
        loop: asyncio.AbstractEventLoop,
        scratch: DeviceMemory,
        users: tuple[PipeUser, PipeUser],
        *,
        leads: bool,
        say: Callable[[DeviceFrame], None],
        lose: Callable[[Exception], None],
        changed: Callable[[], None],
    ) -> None:
        self._worker = worker
        self._loop = loop
        self._scratch = scratch
        self._leads = leads
        # Pipe 0 is the leader's to send.
        self._users = users if leads else (users[1], users[0])
        self._sends = 0 if leads else 1
        self._say = say
        self._lose = lose
        self._changed = changed
        self._pipes = (_Pipe(), _Pipe())
        self._turn: Turn | None = None
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

    def start(self) -> None:
        """Open them, if this side leads; else the peer will."""
        if self._leads:
            self._ask_turn(self._prepare)

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

        self._turn = self._worker.turns.ask(lambda: call_on(self._loop, have_turn))

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
                lost = _lost_by(exc)
                call_on(self._loop, lambda: self._lose(lost))
            else:
                call_on(self._loop, lambda: minted(unique_id))

        def minted(unique_id: bytes) -> None:
            if not self._is_over:
                self._say(MeetDevice(index, unique_id))
                self._meet(index, unique_id)

        self._worker.run(mint)

    def _meet(self, index: int, unique_id: bytes) -> None:
        def opened() -> None:
            call_on(self._loop, lambda: self._met(index))

        def lost(error: Exception) -> None:
            call_on(self._loop, lambda: self._lost(index, error))

        end: PipeEnd = "send" if index == self._sends else "receive"
        pipe = WorkerPipe(end, self._scratch, opened=opened, lost=lost)
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


_SCRATCH_NBYTES = 256


class Staging:
    """Allocated before the pipes are opened, freed when nothing moves any more.

    Of a worker that was given up it is never freed.
    """

    def __init__(self, worker: DeviceWorker) -> None:
        self.scratch: DeviceMemory | None = None
        self._worker = worker
        self._is_freed = False

    async def allocate(self) -> DeviceMemory:
        """Allocate it all on the worker; cancelled, it is freed again.

        While operations wait for their peers it is put off, at most 5 s.

        :raises GPUFailed: there is not so much memory, or no such worker
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[DeviceMemory] = loop.create_future()

        def settle(scratch: DeviceMemory | None, error: Exception | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            elif scratch is not None:
                future.set_result(scratch)

        def allocate() -> None:
            scratch, error = None, None
            try:
                scratch = self._allocate()
            except Exception as exc:  # noqa: BLE001 - raised on the loop
                error = exc
            call_on(loop, lambda: settle(scratch, error))

        if not self._worker.run_when_quiet(allocate):
            raise self._worker.error or GPUFailed("the GPU's worker has stopped")
        return await future

    def free(self) -> None:
        """Free it all, soon; a second call does nothing. Never waits."""
        if self._is_freed:
            return
        self._is_freed = True
        if not self._worker.run_when_quiet(self._free):
            self._worker.kept.append(self)

    def _allocate(self) -> DeviceMemory:
        self.scratch = scratch = self._worker.cuda.malloc(_SCRATCH_NBYTES)
        return scratch

    def _free(self) -> None:
        scratch, self.scratch = self.scratch, None
        if scratch is not None:
            self._worker.cuda.free(scratch)
