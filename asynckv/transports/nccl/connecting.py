"""Both pipes of a transport are opened, and opened again when they were aborted.

On the loop only. The side whose worker has the lower token leads; see
:mod:`asynckv.transports.nccl.lives` for what a pipe's life is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from asynckv.errors import AsyncKVError, PeerLost, RemoteProtocolError
from asynckv.protocol.device_frames import (
    DeviceBroken,
    DeviceFrame,
    DeviceMet,
    DeviceReady,
    MeetDevice,
    PrepareDevice,
)
from asynckv.tensors.cuda import DeviceMemory
from asynckv.transports.nccl.api import UNIQUE_ID_NBYTES
from asynckv.transports.nccl.lives import Life
from asynckv.transports.nccl.operations import call_on
from asynckv.transports.nccl.worker import DeviceWorker
from asynckv.transports.nccl.worker_pipes import PipeEnd, WorkerPipe
from asynckv.transports.nccl.worker_turns import Turn

__all__ = ("Connector", "PipeUser")

_MAX_FAILURES: Final = 3
_BACKOFF_S: Final = 0.05
_PIPES: Final = (0, 1)


class PipeUser(Protocol):
    """Whoever sends or receives by a pipe."""

    def open(self, pipe: WorkerPipe) -> None:
        """It is open, as another generation."""

    def close(self) -> None:
        """It is not open any more."""


class Connector:
    """The lives of both pipes. ``users`` are who sends and who receives on this side.

    ``lose(error)`` is called when a pipe cannot be opened any more; ``changed()`` when
    one is open, or over.
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
        self._lives = (Life(), Life())
        self._pipes: list[WorkerPipe | None] = [None, None]
        self._turn: Turn | None = None
        self._asked: tuple[int | None, int | None] = (None, None)
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False

    @property
    def is_open(self) -> bool:
        """Whether both pipes are."""
        return all(life.state == "open" for life in self._lives)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing moves by either pipe on this side."""
        return all(pipe is None for pipe in self._pipes)

    def start(self) -> None:
        """Open what can be opened, if this side leads; else the peer will."""
        self._timer = None
        may_open = any(life.may_open for life in self._lives)
        if self._leads and may_open and self._turn is None and not self._is_over:
            self._ask_turn(self._prepare)

    def abort(self, error: Exception) -> None:
        """Abort both pipes, for good."""
        self._end()
        for pipe in self._pipes:
            if pipe is not None:
                self._worker.abort(pipe, error)

    def close(self) -> None:
        """End both pipes cleanly, for good: no operation is left."""
        self._end()
        for pipe, life in zip(self._pipes, self._lives, strict=True):
            if pipe is not None and life.state == "open":
                self._worker.close(pipe)
            elif pipe is not None:
                self._worker.abort(pipe, PeerLost("the transport was closed"))

    def break_off(self, error: Exception, *, sending: bool) -> None:
        """Abort one pipe; it is opened again when both sides are quiet."""
        self._fail(self._sends if sending else 1 - self._sends, error)

    def on_prepare(self, frame: PrepareDevice) -> None:
        """The leader has its worker: take this one's turn too.

        :raises RemoteProtocolError: this side leads, or was asked already
        """
        if self._leads or self._turn is not None:
            raise RemoteProtocolError("a PrepareDevice that makes no sense")
        self._asked = frame.generations
        for index in _PIPES:
            if (generation := frame.generations[index]) is not None:
                self._lives[index].begin(generation)
        self._ask_turn(self._get_ready)

    def on_ready(self) -> None:
        """The peer has its worker too: meet.

        :raises RemoteProtocolError: it was not asked
        """
        if not self._leads or self._turn is None or self._asked == (None, None):
            raise RemoteProtocolError("a DeviceReady that makes no sense")
        for index in _PIPES:
            if (generation := self._asked[index]) is not None:
                self._mint(index, generation)
        self._asked = (None, None)
        self._end_turn_if_over()

    def on_meet(self, frame: MeetDevice) -> None:
        """The leader opens this pipe now: so does this side.

        :raises RemoteProtocolError: it is not to be opened
        """
        life = self._lives[frame.pipe]
        if self._leads or len(frame.unique_id) != UNIQUE_ID_NBYTES:
            raise RemoteProtocolError("a MeetDevice that makes no sense")
        if life.state == "opening" and frame.generation == life.generation:
            self._meet(frame.pipe, frame.generation, frame.unique_id)

    def on_met(self, frame: DeviceMet) -> None:
        """The peer is there."""
        if self._lives[frame.pipe].meet(frame.generation, is_peer=True):
            self._use(frame.pipe)

    def on_broken(self, frame: DeviceBroken) -> None:
        """Nothing of that generation moves on the peer's side: abort it here too."""
        index = frame.pipe
        life = self._lives[index]
        if frame.generation == life.generation:
            self._fail(index, PeerLost("the peer has aborted the pipe"))
            if life.quiet(frame.generation, is_peer=True):
                self._after(index)

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
        lives = self._lives
        first, second = (one.generation + 1 if one.may_open else None for one in lives)
        self._asked = first, second
        for life, generation in zip(lives, self._asked, strict=True):
            if generation is not None:
                life.begin(generation)
        self._say(PrepareDevice(self._asked))

    def _get_ready(self) -> None:
        self._asked = (None, None)
        self._say(DeviceReady())
        self._end_turn_if_over()

    def _mint(self, index: int, generation: int) -> None:
        """Make a unique id, and let the peer have it: nobody else ever does."""

        def mint() -> None:
            try:
                unique_id = self._worker.nccl.unique_id()
            except Exception as exc:  # noqa: BLE001 - told on the loop
                error = exc
                call_on(self._loop, lambda: self._fail(index, error))
            else:
                call_on(self._loop, lambda: minted(unique_id))

        def minted(unique_id: bytes) -> None:
            life = self._lives[index]
            if life.state == "opening" and life.generation == generation:
                self._say(MeetDevice(index, generation, unique_id))
                self._meet(index, generation, unique_id)

        self._worker.run(mint)

    def _meet(self, index: int, generation: int, unique_id: bytes) -> None:
        if self._is_over:
            return

        def opened() -> None:
            call_on(self._loop, lambda: self._met(index, generation))

        def lost(error: Exception) -> None:
            call_on(self._loop, lambda: self._lost(index, pipe, error))

        end: PipeEnd = "send" if index == self._sends else "receive"
        pipe = WorkerPipe(end, generation, self._scratch, opened=opened, lost=lost)
        self._pipes[index] = pipe
        self._worker.open(pipe, unique_id)

    def _met(self, index: int, generation: int) -> None:
        life = self._lives[index]
        if life.state == "opening" and life.generation == generation:
            self._say(DeviceMet(index, generation))
            if life.meet(generation):
                self._use(index)

    def _use(self, index: int) -> None:
        pipe = self._pipes[index]
        if pipe is not None and not self._is_over:
            self._users[index].open(pipe)
        self._end_turn_if_over()
        self._changed()

    def _fail(self, index: int, error: Exception) -> None:
        life, pipe = self._lives[index], self._pipes[index]
        if not life.fail(life.generation):
            return
        self._users[index].close()
        if pipe is not None:
            self._worker.abort(pipe, error)
        else:
            self._be_quiet(index)

    def _lost(self, index: int, pipe: WorkerPipe, error: Exception) -> None:
        """Nothing of it moves any more, or the worker was given up."""
        self._pipes[index] = None
        if self._worker.error is not None:
            self._lose(self._worker.error)
        elif not self._is_over:
            life = self._lives[index]
            if life.fail(pipe.generation):
                self._users[index].close()
            if life.failures > _MAX_FAILURES:
                self._lose(_lost_by(error))
            self._be_quiet(index)
        if self._is_over and self.is_quiet:
            self._end_turn()
        self._changed()

    def _be_quiet(self, index: int) -> None:
        life = self._lives[index]
        self._say(DeviceBroken(index, life.generation))
        if life.quiet(life.generation):
            self._after(index)

    def _after(self, index: int) -> None:
        """Both sides are quiet: open it again, after a while."""
        self._end_turn_if_over()
        if self._leads and self._timer is None and not self._is_over:
            delay_s = _BACKOFF_S * (2 ** self._lives[index].failures - 1)
            self._timer = self._loop.call_later(delay_s, self.start)

    def _end_turn_if_over(self) -> None:
        is_asked = self._leads and self._asked != (None, None)
        if not is_asked and not any(life.state == "opening" for life in self._lives):
            had_turn = self._turn is not None
            self._end_turn()
            if had_turn and self._leads and self._timer is None:
                self._timer = self._loop.call_later(0, self.start)

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            self._worker.turns.end(turn)

    def _end(self) -> None:
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        if self.is_quiet:  # else the worker may still be kept by what it opens
            self._end_turn()
        for user in self._users:
            user.close()


def _lost_by(error: Exception) -> Exception:
    if isinstance(error, PeerLost):
        return error
    lost = PeerLost(f"a pipe between GPUs broke again and again: {error}")
    lost.__cause__ = error if isinstance(error, AsyncKVError) else None
    return lost
