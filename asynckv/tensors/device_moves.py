"""Copies between one GPU and pinned memory, queued and watched by one thread.

Whoever wants a copy is told of its end in that thread. A copy that does not end in
time is given up: nobody is told that its memory is free, and it is kept for ever.
"""

from __future__ import annotations

import collections
import itertools
import threading
import time
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

from asynckv.errors import GPUFailed
from asynckv.tensors.cuda import CudaApi, Event, PinnedMemory, Stream

__all__ = ("DeviceMoves", "Move", "MoveOutcome", "free_pinned", "keep_for_ever")

MoveOutcome: TypeAlias = Literal["done", "failed", "dropped", "given up"]

_IDLE_S: Final = 0.5
"""A thread without work for as long ends; the next work starts another."""

_SHORTEST_S: Final = 20e-6
_LONGEST_S: Final = 1e-3

_names = itertools.count(1)

_given_up: list[object] = []
"""What a GPU may still read or write although nobody waits for it any more."""


class Move:
    """One copy. ``ready``: not before that. ``told`` is called once, in the thread.

    ``owner`` keeps the memory of both ends. ``is_wanted`` is asked until the copy is
    queued: from there on it cannot be stopped.
    """

    __slots__ = (
        "deadline_s",
        "event",
        "is_wanted",
        "nbytes",
        "owner",
        "ready",
        "source",
        "target",
        "told",
        "way",
    )

    def __init__(
        self,
        target: int,
        source: int,
        nbytes: int,
        *,
        way: Literal["in", "out"],
        ready: Event | None,
        owner: object,
        is_wanted: Callable[[], bool],
        told: Callable[[MoveOutcome, GPUFailed | None], None],
    ) -> None:
        self.target = target
        self.source = source
        self.nbytes = nbytes
        self.way: Literal["in", "out"] = way
        self.ready = ready
        self.owner = owner
        self.is_wanted = is_wanted
        self.told = told
        self.event: Event | None = None
        self.deadline_s = 0.0


class DeviceMoves:
    """One GPU's thread. It makes ``begin``'s things first, and ``end`` unmakes them.

    The two directions have a stream each, so that they go on beside each other.
    """

    def __init__(
        self,
        open_cuda: Callable[[], CudaApi],
        device: int,
        *,
        begin: Callable[[CudaApi], None],
        end: Callable[[CudaApi], None],
        failed: Callable[[Exception], None],
        limit_s: float = 30.0,
    ) -> None:
        self._open_cuda = open_cuda
        self._device = device
        self._begin, self._end, self._failed = begin, end, failed
        self._limit_s = limit_s
        self._changed = threading.Condition()
        self._inbox: collections.deque[Move] = collections.deque()
        self._has_thread = False
        self._is_closed = False
        self._beat_s = 0.0
        # From here on the thread's alone.
        self._cuda: CudaApi | None = None
        self._streams: dict[str, Stream] = {}
        self._events: list[Event] = []
        self._waiting: collections.deque[Move] = collections.deque()
        self._moving: collections.deque[Move] = collections.deque()

    def start(self, *moves: Move) -> None:
        """Queue copies; without one, only begin. Never waits.

        :raises RuntimeError: it is closed, or the process can have no thread
        """
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the staging of this GPU is closed")
            self._start_thread()  # or raise: then nothing is queued
            self._inbox.extend(moves)

    @property
    def is_stuck(self) -> bool:
        """Whether the thread is in a call of CUDA's that does not return."""
        late_s = time.monotonic() - self._beat_s
        return self._has_thread and late_s > self._limit_s + _IDLE_S

    def close(self) -> None:
        """Take no more; end after what is queued. Never waits, may be called again."""
        with self._changed:
            self._is_closed = True
            if self._has_thread or self._cuda is not None:
                self._start_thread()

    def _start_thread(self) -> None:
        if not self._has_thread:
            name = f"asynckv-gpu-{self._device}-{next(_names)}"
            # No daemon: see CopyPool. It ends when it has no work.
            self._beat_s = time.monotonic()
            threading.Thread(target=self._work, name=name, daemon=False).start()
            self._has_thread = True
        self._changed.notify()

    def _work(self) -> None:
        try:
            cuda = self._opened()
            pause_s = _SHORTEST_S
            while self._take_in(pause_s):
                has_moved = self._queue_ready(cuda) | self._look()
                pause_s = _SHORTEST_S if has_moved else min(2 * pause_s, _LONGEST_S)
            if self._is_closed:
                self._unmake()
        except Exception as exc:  # noqa: BLE001 - told to whoever waits for a copy
            self._fail_all(exc)

    def _opened(self) -> CudaApi:
        if self._cuda is not None:
            self._cuda.use_device(self._device)
            return self._cuda
        cuda = self._open_cuda()
        cuda.use_device(self._device)
        self._streams = {"in": cuda.stream(), "out": cuda.stream()}
        self._cuda = cuda
        self._begin(cuda)
        return cuda

    def _take_in(self, pause_s: float) -> bool:
        """Wait for work, or for a moment if there is some; whether to go on."""
        self._beat_s = time.monotonic()
        with self._changed:
            is_busy = bool(self._waiting or self._moving)
            if not self._inbox and not (self._is_closed and not is_busy):
                self._changed.wait(pause_s if is_busy else _IDLE_S)
            self._waiting.extend(self._inbox)
            self._inbox.clear()
            if self._waiting or self._moving:
                return True
            self._has_thread = self._is_closed  # then nobody starts another
            return False

    def _queue_ready(self, cuda: CudaApi) -> bool:
        before = len(self._waiting)
        for _ in range(before):
            move = self._waiting.popleft()
            if not move.is_wanted():
                move.told("dropped", None)
                continue
            try:
                if move.ready is not None and not move.ready.query():
                    self._waiting.append(move)
                else:
                    self._queue(cuda, move)
            except GPUFailed as exc:
                move.told("failed", exc)
            except Exception as exc:
                self._give_up(move, GPUFailed(str(exc)))  # it may be under way
                raise
        return len(self._waiting) < before

    def _queue(self, cuda: CudaApi, move: Move) -> None:
        stream = self._streams[move.way]
        if not self._events:
            self._events.append(cuda.event())
        cuda.copy(move.target, move.source, move.nbytes, stream)
        event = self._events.pop()
        move.deadline_s = time.monotonic() + self._limit_s
        try:
            event.record(stream)
        except GPUFailed as exc:
            self._give_up(move, exc)  # when it ends nobody will know
        else:
            move.event = event
            self._moving.append(move)

    def _look(self) -> bool:
        before = len(self._moving)
        for _ in range(before):
            move = self._moving.popleft()
            try:
                has_ended = move.event is None or move.event.query()
            except GPUFailed as exc:
                move.told("failed", exc)  # CUDA runs nothing of it any more
                continue
            except Exception as exc:
                self._give_up(move, GPUFailed(str(exc)))
                raise
            if has_ended:
                if move.event is not None:
                    self._events.append(move.event)
                move.told("done", None)
            elif time.monotonic() > move.deadline_s:
                self._give_up(move, _too_late(self._limit_s))
            else:
                self._moving.append(move)
        return len(self._moving) < before

    def _give_up(self, move: Move, error: GPUFailed) -> None:
        keep_for_ever(move)
        move.told("given up", error)

    def _fail_all(self, error: Exception) -> None:
        """Whatever it was, nobody waits for this thread any more."""
        with self._changed:
            self._has_thread = False
            self._is_closed = True
            left = [*self._waiting, *self._inbox]
            self._waiting.clear()
            self._inbox.clear()
        self._failed(error)
        for move in left:
            move.told("dropped", None)
        for move in self._moving:
            self._give_up(move, GPUFailed(str(error)))
        self._moving.clear()

    def _unmake(self) -> None:
        cuda, self._cuda = self._cuda, None
        try:
            if cuda is not None:
                self._end(cuda)
            for event in self._events:
                event.close()
            for stream in self._streams.values():
                stream.close()
        except GPUFailed as exc:  # the context is gone, and all of it with that
            self._failed(exc)
        self._events.clear()
        self._streams.clear()
        self._has_thread = False


def keep_for_ever(memory: object) -> None:
    """Never free what a GPU may still be at."""
    _given_up.append(memory)


def free_pinned(cuda: CudaApi, pinned: PinnedMemory) -> None:
    """Free pinned memory, at which nobody looks any more: it cannot be known."""
    pinned.view.release()
    cuda.host_free(pinned)


def _too_late(limit_s: float) -> GPUFailed:
    return GPUFailed(
        f"a copy of the GPU has not ended within {limit_s:g} s",
        hint="its memory is kept for ever; the GPU or its driver is stuck: nvidia-smi",
    )
