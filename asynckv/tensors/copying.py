"""Copies and digests of tensors, off the event loop.

Threads never touch the loop: they end a call by ``call_soon_threadsafe`` alone.
Nothing here holds the GIL for longer than a small piece takes.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy
import torch

from asynckv.affinity import ProcessBound
from asynckv.protocol.wire import Digester
from asynckv.tensors.blocks import KVMemory
from asynckv.tensors.jobs import CopyJob
from asynckv.tensors.runs import Runs, copied, landed, pieces_of
from asynckv.tensors.views import bytes_of, check_sendable, empty_tensor, memory_of
from asynckv.types import TensorSpec
from asynckv.waits.waiting import wait_or_stop

__all__ = ("HostCopyPool",)

_PIECE_NBYTES: Final = 2**20
"""A thread asks whether to go on after as much; it also stays in the cache."""

_LATE_S: Final = 1.0
"""So often it is looked whether a thread has got on, and so long after its limit."""

_IDLE_S: Final = 0.5
"""A thread without work for as long ends; the next work starts another."""

_NICENESS: Final = 3
"""So much above its process: where all cores are busy the loop's thread goes first."""

_AT_ONCE_NBYTES: Final = 64 * 1024
_AT_ONCE_TENSORS: Final = 16

_names = itertools.count(1)

_Place: TypeAlias = KVMemory | Runs


class _Stopped(Exception):
    """Nobody wants the result any more."""


class _Making(NamedTuple):
    """Makes the jobs of a call, which are done instead of it."""

    make: Callable[[], Sequence[CopyJob]]
    nbytes: int = 0


class _Call:
    """One call's tensors: which are left, who is at them, what came out."""

    def __init__(
        self,
        sources: Sequence[_Place] | Sequence[CopyJob] | Sequence[_Making],
        targets: Sequence[_Place] | None,
        digest: bool,
    ) -> None:
        self._sources = sources
        self._targets = targets
        self._digest = digest
        self._made: Sequence[CopyJob] = ()
        self.next_index = 0
        self.busy_threads = 0
        self.stopped = False
        self.is_given_up = False
        self.beat_s = time.monotonic()
        self.error: BaseException | None = None
        self.digests = [b""] * len(sources)

    def forget(self) -> None:
        """It is over: keep no tensor alive, whoever keeps the call."""
        if not self.busy_threads:
            self._sources = self._targets = ()

    @property
    def may_be_late(self) -> bool:
        """Does it have, or make, jobs that may only take so long to get on?"""
        return self._targets is None and not self._digest

    @property
    def late_job(self) -> CopyJob | None:
        """One that has not got on for longer than it may, while threads are at it."""
        source = self._sources[0] if self.busy_threads and len(self._sources) else None
        if not isinstance(source, CopyJob) or source.limit_s is None:
            return None
        late_s = time.monotonic() - self.beat_s
        return source if late_s > source.limit_s + _LATE_S else None

    def give_up(self, job: CopyJob) -> None:
        """Let its threads go, wherever they are: they keep what they are at."""
        self.stopped = self.is_given_up = True
        self.error = job.give_up()
        for other in self._sources:
            if isinstance(other, CopyJob) and other is not job:
                other.give_up()

    @property
    def is_taken(self) -> bool:
        """No thread needs to come any more."""
        return self.stopped or self.next_index == len(self.digests)

    def take(self) -> range:
        """Take the next tensors: one large one, or several small ones."""
        first, nbytes = self.next_index, 0
        while self.next_index < len(self.digests) and nbytes < _PIECE_NBYTES:
            nbytes += self._sources[self.next_index].nbytes
            self.next_index += 1
        return range(first, self.next_index)

    def grow(self) -> bool:
        """Take in the jobs that one has made; return whether there are any."""
        made, self._made = self._made, ()
        if self.stopped or not made:
            return False
        self._sources = made
        self.next_index, self.digests = 0, [b""] * len(made)
        return True

    def run(self, indices: range) -> None:
        """Copy and digest these tensors, asking between pieces whether to go on."""
        # Inference mode: tensors of that kind, and leaves that want gradients,
        # may be written to.
        with torch.inference_mode():
            for index in indices:
                target = None if self._targets is None else self._targets[index]
                self.digests[index] = self._run_one(self._sources[index], target)

    def _run_one(
        self, source: _Place | CopyJob | _Making, target: _Place | None
    ) -> bytes:
        if isinstance(source, _Making):
            self._made = source.make()
            return b""
        if isinstance(source, CopyJob):
            # Closed by hand: an error that somebody keeps would keep it open, and a
            # GPU at its memory.
            with contextlib.closing(source.steps()) as steps:
                for _ in steps:
                    self.beat_s = time.monotonic()
                    if self.stopped:
                        raise _Stopped
            return b""
        digester = Digester()
        for piece in _pieces(source, target):
            if self._digest:
                digester.update(piece)
            if self.stopped:
                raise _Stopped
        return digester.digest() if self._digest else b""


class HostCopyPool(ProcessBound):
    """A few threads that copy tensors and digest them.

    They are started when there is work for them, and end soon after there is none.
    ``empty`` makes tensors to copy into, ``host_empty`` those that lanes can read.
    Memory of GPUs is for :class:`~asynckv.devices.copying.CopyPool`.
    """

    def __init__(
        self,
        threads: int = 2,
        *,
        empty: Callable[[TensorSpec], torch.Tensor] = empty_tensor,
    ) -> None:
        self._own()
        self.empty = self.host_empty = empty
        self._max_threads = threads
        self._threads = 0
        self._closed = False
        self._changed = threading.Condition()
        self._waiting: collections.deque[tuple[_Call, Callable[[], None]]] = (
            collections.deque()
        )

    async def copy(
        self,
        sources: Sequence[_Place],
        targets: Sequence[_Place],
        *,
        digest: bool = True,
    ) -> list[bytes]:
        """Copy each source into its target; return the targets' digests.

        Sources may have any strides; targets are contiguous, of equal shape and
        dtype. Either may be blocks, or runs of as many bytes, beside what is
        contiguous. Without ``digest`` the digests are empty. Up to 64 KiB in all are
        copied at once, more in the threads.

        A cancelled call stops at the next piece (1 MiB) and ends when no thread
        touches a source or a target; targets may hold part of the copy then, as they
        may after an error.

        :raises ValueError: a source and its target differ, or cannot be copied
        :raises RuntimeError: the pool is closed, or the process can have no thread
        """
        if len(sources) != len(targets):
            raise ValueError(f"{len(sources)} sources and {len(targets)} targets")
        is_small = _is_small(sources)
        call = _Call(sources, targets, digest)
        del sources, targets  # an error's traceback would keep them alive
        return await self._run(call, is_small=is_small)

    async def digest(self, tensors: Sequence[_Place]) -> list[bytes]:
        """Return the digest of each tensor's elements in order, dense or not.

        A cancelled call ends when no thread reads the tensors any more.

        :raises ValueError: a tensor has no bytes to be read
        :raises RuntimeError: the pool is closed, or the process can have no thread
        """
        is_small = _is_small(tensors)
        call = _Call(tensors, None, True)
        del tensors
        return await self._run(call, is_small=is_small)

    async def run(self, jobs: Sequence[CopyJob]) -> None:
        """Do jobs, beside each other: up to 64 KiB in all at once, more in the threads.

        A cancelled call ends when no thread is at one; each may be half done then, as
        it may be after an error.

        :raises Exception: what a job raises; the others may be half done
        :raises RuntimeError: the pool is closed, or the process can have no thread
        """
        call, is_small = _Call(jobs, None, False), _is_small(jobs)
        del jobs
        await self._run(call, is_small=is_small)

    async def make_and_run(self, make: Callable[[], Sequence[CopyJob]]) -> None:
        """Call ``make`` in a thread, and do the jobs that it returns as :meth:`run`.

        For jobs that take their time to be made: a millisecond on the loop is one in
        which nobody else is served. Nothing is done on the loop, however small it is.

        A cancelled call waits for ``make`` to return, and then as :meth:`run` does.

        :raises Exception: what ``make`` raises: no job was begun; or what a job raises
        :raises RuntimeError: the pool is closed, or the process can have no thread
        """
        call = _Call([_Making(make)], None, False)
        await self._run(call, is_small=False)

    def free(self, tensors: list[torch.Tensor]) -> None:
        """Empty the list, in a thread where it holds more than 1 MiB. Never waits.

        To give 64 MiB back takes 4 ms: on the loop nobody else would be served.
        """

        def empty() -> Sequence[CopyJob]:
            tensors.clear()
            return ()

        nbytes = sum(tensor.nbytes for tensor in tensors)
        if nbytes <= _PIECE_NBYTES or self._closed:
            tensors.clear()
            return
        call = _Call([_Making(empty)], None, False)
        try:
            self._submit(call, call.forget)
        except RuntimeError:  # no thread can be had
            tensors.clear()

    def close(self) -> None:
        """Take no more calls. Threads end after those under way; never waits."""
        if self._is_copy:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if not self._threads:
                self._end_of_threads()

    async def _run(self, call: _Call, *, is_small: bool) -> list[bytes]:
        if self._closed:
            raise RuntimeError("the copy pool is closed")
        if is_small:
            call.run(range(len(call.digests)))
            return call.digests
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def end_soon() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_set_done, future)

        watch: asyncio.TimerHandle | None = None

        def look() -> None:
            nonlocal watch
            self._give_up_if_late(call, end_soon)
            watch = loop.call_later(_LATE_S, look)

        self._submit(call, end_soon)
        if call.may_be_late:
            watch = loop.call_later(_LATE_S, look)
        try:
            await wait_or_stop(future, lambda: self._stop(call))
        except BaseException:
            call.error = None  # nobody is told, and its traceback keeps tensors alive
            raise
        finally:
            if watch is not None:
                watch.cancel()
            call.forget()
        if call.error is not None:
            raise call.error
        return call.digests

    def _submit(self, call: _Call, end: Callable[[], None]) -> None:
        with self._changed:
            self._waiting.append((call, end))
            try:
                self._start_threads()
            except RuntimeError:  # the process has as many threads as it may
                if not self._threads:
                    self._waiting.remove((call, end))
                    raise
            self._changed.notify_all()

    def _start_threads(self) -> None:
        while self._threads < self._max_threads:
            name = f"asynckv-copy-{next(_names)}"
            # No daemons: one that is in torch while the interpreter ends takes
            # the process down. None outlives its work by more than _IDLE_S.
            threading.Thread(target=self._work, name=name, daemon=False).start()
            self._threads += 1

    def _stop(self, call: _Call) -> None:
        with self._changed:
            call.stopped = True
            for waiting, end in list(self._waiting):
                if waiting is call:
                    self._waiting.remove((waiting, end))
                    self._end_if_over(call, end)

    def _give_up_if_late(self, call: _Call, end: Callable[[], None]) -> None:
        with self._changed:
            job = None if call.is_given_up else call.late_job
            if job is None:
                return
            if (call, end) in self._waiting:
                self._waiting.remove((call, end))
            call.give_up(job)
            self._threads -= call.busy_threads  # others may take their place
            end()

    def _end_of_threads(self) -> None:
        """The pool is closed, and no thread is left. Called under the lock."""

    def _work(self) -> None:
        _step_back()
        with self._changed:
            while True:
                while not self._waiting and not self._closed:
                    if not self._changed.wait(_IDLE_S):
                        break
                if not self._waiting:
                    self._threads -= 1
                    if self._closed and not self._threads:
                        self._end_of_threads()
                    return
                call, end = self._waiting.popleft()
                indices = call.take()
                if not call.is_taken:
                    self._waiting.append((call, end))
                self._run_unlocked(call, indices)
                if call.is_given_up:
                    return
                if call.grow():
                    self._waiting.append((call, end))
                    self._changed.notify_all()
                self._end_if_over(call, end)

    def _run_unlocked(self, call: _Call, indices: range) -> None:
        call.busy_threads += 1
        call.beat_s = time.monotonic()
        self._changed.release()
        try:
            call.run(indices)
        except _Stopped:
            pass
        except BaseException as exc:  # noqa: BLE001 - _run() raises it on the loop
            call.error = call.error or exc
            self._stop(call)
        finally:
            self._changed.acquire()
            call.busy_threads -= 1

    def _end_if_over(self, call: _Call, end: Callable[[], None]) -> None:
        if call.is_taken and not call.busy_threads:
            end()


def _step_back() -> None:
    """Make this thread less urgent. What it costs the copies was not measurable; the
    loop's p99 lag beside them went from 3.4 to 1.6 ms on two cores.
    """
    if sys.platform == "linux":  # elsewhere that is said of processes alone
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            niceness = os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS
            os.setpriority(os.PRIO_PROCESS, thread, niceness)


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _is_small(tensors: Sequence[_Place] | Sequence[CopyJob]) -> bool:
    if len(tensors) > _AT_ONCE_TENSORS:
        return False
    return sum(tensor.nbytes for tensor in tensors) <= _AT_ONCE_NBYTES


def _pieces(source: _Place, target: _Place | None) -> Iterator[memoryview]:
    """Copy piece by piece, and yield each piece's bytes while they are hot."""
    if isinstance(source, torch.Tensor) and isinstance(target, torch.Tensor | None):
        yield from _tensor_pieces(source, target)
    else:
        yield from _block_pieces(source, target)


def _block_pieces(source: _Place, target: _Place | None) -> Iterator[memoryview]:
    if target is None:
        origin = memory_of(source)
        for start in range(0, origin.nbytes, _PIECE_NBYTES):
            yield from pieces_of(
                origin, start, min(start + _PIECE_NBYTES, origin.nbytes)
            )
        return
    _check_equal(source, target)
    if isinstance(source, torch.Tensor):
        check_sendable(source)
    if isinstance(source, torch.Tensor) and not _is_dense(source):
        yield from landed(_strided_pieces(source, None), memory_of(target))
    else:
        yield from copied(memory_of(source), memory_of(target), _PIECE_NBYTES)


def _check_equal(source: _Place, target: _Place) -> None:
    if isinstance(source, Runs) or isinstance(target, Runs):
        if source.nbytes != target.nbytes:
            raise ValueError(f"{source.nbytes} bytes are not {target.nbytes}")
    elif (source.shape, source.dtype) != (target.shape, target.dtype):
        raise ValueError(
            f"a {source.dtype} {tuple(source.shape)} cannot be copied into "
            f"a {target.dtype} {tuple(target.shape)}"
        )


def _tensor_pieces(
    source: torch.Tensor, target: torch.Tensor | None
) -> Iterator[memoryview]:
    check_sendable(source)
    if target is not None:
        _check_equal(source, target)
        bytes_of(target)  # refuses what is not contiguous
    if _is_dense(source):
        yield from _dense_pieces(source, target)
    else:
        yield from _strided_pieces(source, target)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Is its memory its elements in order?"""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _dense_pieces(
    source: torch.Tensor, target: torch.Tensor | None
) -> Iterator[memoryview]:
    origin = bytes_of(source)
    memory = origin if target is None else bytes_of(target)
    for start in range(0, origin.nbytes, _PIECE_NBYTES):
        piece = memory[start : start + _PIECE_NBYTES]
        if target is not None:
            # Not a slice assignment: memoryview keeps the GIL while it copies.
            numpy.copyto(
                numpy.frombuffer(piece, numpy.uint8),
                numpy.frombuffer(origin[start : start + _PIECE_NBYTES], numpy.uint8),
            )
        yield piece


def _strided_pieces(
    source: torch.Tensor, target: torch.Tensor | None
) -> Iterator[memoryview]:
    if source.nbytes <= _PIECE_NBYTES:
        if target is None:
            target = torch.empty_like(source, memory_format=torch.contiguous_format)
        yield bytes_of(target.copy_(source))
        return
    rows = max(1, _PIECE_NBYTES * len(source) // source.nbytes)
    for first in range(0, len(source), rows):
        part = slice(first, first + rows) if rows > 1 else first
        yield from _strided_pieces(
            source[part], None if target is None else target[part]
        )
