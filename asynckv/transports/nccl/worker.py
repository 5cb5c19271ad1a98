"""The one thread of a GPU that calls NCCL: it issues, it polls, it aborts.

NCCL is not safe in two threads of one device, and an abort only while no thread is in
it. So everything is done here, one after the other, for all pipes of the GPU. A call
that does not return cannot be ended: the worker is *given up*. Nothing that it may
still touch is ever freed or used again, and :attr:`DeviceWorker.health` says so. What
it allocates and frees is put off while operations wait for a peer.

NCCL's rule is of the process, not of any object in it: a GPU has one worker, however
many links and buffers use it. So this is the one place of the package that is the same
for all.

Opening a pipe blocks the worker. Both sides take a turn, always that of the lower token
first: so of any number of workers that open pipes to each other none waits for one that
waits for it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

from asynckv.devices.access import gpu_access
from asynckv.devices.cuda import CudaApi, Event
from asynckv.devices.imports import in_thread
from asynckv.devices.names import Device
from asynckv.errors import ConfigError, GPUFailed
from asynckv.transports.nccl.api import NcclApi, open_nccl
from asynckv.transports.nccl.worker_pipes import WorkerPipe
from asynckv.transports.parts import call_on

__all__ = (
    "DeviceWorker",
    "Job",
    "WorkerTurns",
    "WorkerUse",
    "use_worker",
    "worker_of",
)


class WorkerTurns:
    """First come, first served. From any thread; nothing waits.

    Each is known by what it begins with.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line: collections.deque[Callable[[], None]] = collections.deque()

    @property
    def count(self) -> int:
        """How many have a turn or wait for one."""
        return len(self._line)

    def ask(self, begin: Callable[[], None]) -> None:
        """Call ``begin()`` when it is this one's turn: now, or by who ends another."""
        with self._lock:
            self._line.append(begin)
            is_first = len(self._line) == 1
        if is_first:
            begin()

    def end(self, begin: Callable[[], None]) -> None:
        """It is over, or not wanted any more. A second call does nothing."""
        with self._lock:
            if begin not in self._line:
                return
            was_first = self._line[0] is begin
            self._line.remove(begin)
            follower = self._line[0] if was_first and self._line else None
        if follower is not None:
            follower()


logger = logging.getLogger(__name__)

_Command: TypeAlias = Callable[[], None]

_LEAST_IDLE_S: Final = 20e-6
_MOST_IDLE_S: Final = 1e-3
_BLOCKED_S: Final = 5.0
"""While a call takes longer, nobody waits for the worker who has another way."""
_SCRATCH_NBYTES: Final = 256
"""The first byte of each pipe lies there, which means nothing."""

_names = itertools.count(1)


class Job(Protocol):
    """One operation of a pipe, with the memory that it moves."""

    deadline: float

    def issue(self, pipe: WorkerPipe) -> Event:
        """Queue it, and return the event behind it. On the worker's thread."""

    def settle(self, error: Exception | None) -> None:
        """Nothing touches its memory: its event has fired, on the worker's thread.

        Or it was never issued, and its pipe is aborted: then on any thread.
        """

    def abandon(self, error: Exception) -> None:
        """The worker was given up: whoever waits is told. On any thread, once."""


@dataclasses.dataclass(eq=False, slots=True)
class _Flight:
    pipe: WorkerPipe
    job: Job
    event: Event | None


class _Opening:
    """The first byte of a pipe: it connects, and is polled as any operation is."""

    def __init__(self, pipe: WorkerPipe) -> None:
        self.deadline = time.monotonic() + pipe.open_s
        self._pipe = pipe

    def issue(self, pipe: WorkerPipe) -> Event:
        return pipe.mark()

    def settle(self, error: Exception | None) -> None:
        if error is None:
            self._pipe.opened()

    def abandon(self, error: Exception) -> None:
        """The pipe itself is told."""


class DeviceWorker:
    """All of a GPU's payload, on one daemon thread that starts with the first work.

    To be made off the loop: it asks CUDA for the GPU's UUID and a little memory, and
    NCCL for its version. That memory is freed when it stops.

    ``stuck_s``: a call that takes longer will never return. ``abort_grace_s``: so long
    after an abort its events may take to fire.
    """

    def __init__(
        self,
        cuda: CudaApi,
        nccl: NcclApi,
        device: int,
        *,
        stuck_s: float = 60.0,
        abort_grace_s: float = 5.0,
    ) -> None:
        self.cuda = cuda
        self.nccl = nccl
        self.device = device
        self.uuid = cuda.uuid(device)
        self.nccl_version = nccl.version()
        self.token = secrets.token_bytes(8)
        """Orders workers, so that two sides take turns without a circle."""
        self.turns = WorkerTurns()
        self.users = 0
        self.kept: list[object] = []
        """What is never freed, because the GPU may still touch it."""
        self._stuck_s = stuck_s
        self._blocked_s = _BLOCKED_S
        self._abort_grace_s = abort_grace_s
        self._commands: collections.deque[_Command] = collections.deque()
        self._gpu = gpu_access(cuda, device)
        self._came = threading.Event()
        self._lock = threading.Lock()
        self._jobs: dict[Job, WorkerPipe | None] = {}
        """All that have not settled; those that are not begun with their pipe."""
        self._flights: list[_Flight] = []
        self._pipes: list[WorkerPipe] = []
        self._thread: threading.Thread | None = None
        self.error: Exception | None = None
        """Why it was given up, if it was."""
        self._busy_since: float | None = None
        self._is_stopping = False
        # Before any operation is under way: else it would wait for their peers.
        with self._gpu.allocating():
            cuda.use_device(device)
            self._scratch = cuda.malloc(_SCRATCH_NBYTES)

    @property
    def health(self) -> str:
        """``"ok"``, or ``"failed: ..."`` once it was given up."""
        return "ok" if self.error is None else f"failed: {self.error}"

    @property
    def is_blocked(self) -> bool:
        """Whether it has been in one call for long, which may still return."""
        since = self._busy_since
        return since is not None and time.monotonic() - since > self._blocked_s

    @property
    def why_not(self) -> Exception | None:
        """Why nobody should wait for it now, if so."""
        if self.error is None and self.is_blocked:
            return GPUFailed("the GPU's worker waits in NCCL for another peer")
        return self.error

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def run(self, command: _Command) -> bool:
        """Let the thread call ``command``, soon; whether it will. From any thread."""
        with self._lock:
            if self.error is not None or self._is_stopping:
                return False
            if self._thread is None:
                name = f"asynckv-gpu-{self.device}-{next(_names)}"
                thread = threading.Thread(target=self._main, name=name, daemon=True)
                self._thread = thread
                thread.start()
            self._commands.append(command)
        self._came.set()
        return True

    def issue(self, pipe: WorkerPipe, job: Job) -> None:
        """Post ``job``'s operation behind those of its pipe. From any thread."""
        with self._lock:
            self._jobs[job] = pipe
        if not self.run(lambda: self._issue(pipe, job)):
            with self._lock:
                left = self._jobs.pop(job, None)
            if left is not None:
                job.abandon(self.error or GPUFailed("the GPU's worker has stopped"))

    def open(self, pipe: WorkerPipe, unique_id: bytes) -> None:
        """Open ``pipe``; blocks the thread until the peer opens it too."""
        if not self.run(lambda: self._open(pipe, unique_id)):
            pipe.lost(self.error or GPUFailed("the GPU's worker has stopped"))

    def abort(self, pipe: WorkerPipe, error: Exception) -> None:
        """End ``pipe`` now; its jobs settle with ``error`` when they are quiet.

        That is at once for those that were not begun: the thread may be blocked.
        """
        with self._lock:
            queued = [job for job, its in self._jobs.items() if its is pipe]
            for job in queued:
                del self._jobs[job]
        for job in queued:
            job.settle(error)
        self.run(lambda: self._fail(pipe, error))

    def close(self, pipe: WorkerPipe) -> None:
        """End ``pipe`` cleanly; one with an operation under way is aborted instead."""
        self.run(lambda: self._close(pipe))

    def check(self) -> None:
        """Give the worker up if it is stuck in a call. To be called now and then."""
        since = self._busy_since
        if since is not None and time.monotonic() - since > self._stuck_s:
            self.give_up(GPUFailed(f"a call took longer than {self._stuck_s:g} s"))

    def give_up(self, error: Exception) -> None:
        """Wait for it no longer. What its jobs touch is kept for ever."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            left = list(self._jobs)
            self._jobs.clear()
            pipes = list(self._pipes)
            self.kept += [*left, *pipes, *self._flights]
        logger.error("the worker of GPU %d is given up: %s", self.device, error)
        for job in left:
            job.abandon(error)
        for pipe in pipes:
            pipe.lost(error)
        self._came.set()

    def stop(self) -> None:
        """Let the thread end when it has done all it was told. Never waits."""
        self.run(lambda: None)  # one that has not begun has its memory to free
        with self._lock:
            self._is_stopping = True
        self._came.set()

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended: whether it has. Not on an event loop."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.is_alive

    # On the thread.

    def _main(self) -> None:
        try:
            self._work()
        except Exception as exc:  # noqa: BLE001 - nothing is polled any more
            error = GPUFailed(f"its thread has failed: {exc!r}")
            error.__cause__ = exc
            self.give_up(error)

    def _work(self) -> None:
        self._busy_since = time.monotonic()
        self.cuda.use_device(self.device)
        idle_s = _LEAST_IDLE_S
        while self.error is None:
            command = self._next(idle_s)
            self._busy_since = time.monotonic()
            if command is not None:
                command()
            elif self._is_stopping and not self._commands and not self._flights:
                break  # in this order: no command comes once it is stopping
            has_come, command = command is not None, None  # it keeps its job's memory
            progressed = self._poll() or has_come
            idle_s = _LEAST_IDLE_S if progressed else min(idle_s * 2, _MOST_IDLE_S)
        if self.error is None:
            self._free_scratch()
        self._busy_since = None

    def _free_scratch(self) -> None:
        with self._gpu.allocating(0):
            self.cuda.free(self._scratch)

    def _next(self, idle_s: float) -> _Command | None:
        """Wait for a command: at most ``idle_s`` while there is something to poll."""
        self._busy_since = None
        self._came.clear()
        if not self._commands and not self._is_stopping and self.error is None:
            self._came.wait(idle_s if self._flights else None)
        elif not self._commands and self._flights:
            self._came.wait(idle_s)
        return self._commands.popleft() if self._commands else None

    def _issue(self, pipe: WorkerPipe, job: Job) -> None:
        with self._lock:
            if job not in self._jobs:
                return  # somebody was told already
            self._jobs[job] = None
        if pipe.error is not None:
            self._finish(job, pipe.error)
            return
        self._gpu.begin_operation()
        try:
            event = job.issue(pipe)
        except Exception as exc:  # noqa: BLE001 - the pipe is out of step, and ends
            # Some of it may be queued: it is quiet when all of the stream is.
            self._flights.append(_Flight(pipe, job, pipe.mark_if_possible()))
            self._fail(pipe, exc)
        else:
            self._flights.append(_Flight(pipe, job, event))

    def _open(self, pipe: WorkerPipe, unique_id: bytes) -> None:
        job = _Opening(pipe)
        with self._lock:
            self._pipes.append(pipe)
            self._jobs[job] = None
        self._gpu.begin_operation()
        try:
            pipe.open(unique_id, self._scratch)
        except Exception as exc:  # noqa: BLE001 - who opens is told
            self._flights.append(_Flight(pipe, job, pipe.mark_if_possible()))
            self._fail(pipe, exc)
        else:
            self._issue(pipe, job)
            self._gpu.end_operation()

    def _poll(self) -> bool:
        """Settle what has ended, and fail what should have: whether anything was."""
        now, progressed = time.monotonic(), False
        waiting: set[WorkerPipe] = set()
        for flight in list(self._flights):
            pipe = flight.pipe
            # In order: an event may fire while a later one is looked at.
            if pipe in waiting or self.error is not None:
                continue
            if (why := self._why_to_end(flight, now)) is not None:
                self._fail(pipe, why)
                progressed = True
            if self._has_fired(flight):
                self._flights.remove(flight)
                self._gpu.end_operation()
                self._settle(flight, pipe.error)
                progressed = True
                self._end_if_quiet(pipe)
            else:
                waiting.add(pipe)
        for pipe in list(self._pipes):
            if pipe.quiet_by is not None and now > pipe.quiet_by:
                self.give_up(GPUFailed(f"{pipe} was aborted, and moves on"))
        return progressed

    def _why_to_end(self, flight: _Flight, now: float) -> Exception | None:
        if flight.pipe.error is not None:
            return None
        if now > flight.job.deadline:
            return TimeoutError("an operation on the GPU took too long")
        return flight.pipe.async_error()

    def _has_fired(self, flight: _Flight) -> bool:
        try:
            return flight.event is None or flight.event.query()
        except Exception as exc:  # noqa: BLE001 - it failed: it touches nothing more
            self._fail(flight.pipe, exc)
            return True

    def _fail(self, pipe: WorkerPipe, error: Exception) -> None:
        if pipe.error is not None:
            return
        pipe.error = error
        with self._lock:
            if pipe not in self._pipes:
                self._pipes.append(pipe)
        # Past the last call into NCCL: here, and only here, an abort is legal.
        self._end_comm(pipe, is_aborted=True)
        pipe.quiet_by = time.monotonic() + self._abort_grace_s
        self._end_if_quiet(pipe)

    def _close(self, pipe: WorkerPipe) -> None:
        error = GPUFailed("the pipe was closed")
        if self._has_flights(pipe):
            # To destroy waits for what the peer may never post.
            self._fail(pipe, error)
        elif pipe.error is None:
            pipe.error = error
            self._end_comm(pipe, is_aborted=False)
            self._end_if_quiet(pipe)

    def _end_comm(self, pipe: WorkerPipe, *, is_aborted: bool) -> None:
        if (left := pipe.end_comm(is_aborted=is_aborted)) is not None:
            self.kept.append(left)

    def _has_flights(self, pipe: WorkerPipe) -> bool:
        return any(one.pipe is pipe for one in self._flights)

    def _end_if_quiet(self, pipe: WorkerPipe) -> None:
        if pipe.error is None or self._has_flights(pipe) or self.error is not None:
            return
        pipe.quiet_by = None
        pipe.release()  # where it fails, the worker is given up, and the pipe told so
        with self._lock, contextlib.suppress(ValueError):
            self._pipes.remove(pipe)
        pipe.lost(pipe.error)

    def _settle(self, flight: _Flight, error: Exception | None) -> None:
        if flight.event is not None:
            flight.event.close()
        self._finish(flight.job, error)

    def _finish(self, job: Job, error: Exception | None) -> None:
        with self._lock:
            if job not in self._jobs:
                return  # given up meanwhile: somebody was told already
            del self._jobs[job]
        try:
            job.settle(error)
        except Exception as exc:
            job.abandon(exc)
            raise


class WorkerUse:
    """One user of a GPU's worker, until :meth:`end`."""

    def __init__(self, key: tuple[CudaApi, int], worker: DeviceWorker) -> None:
        worker.users += 1
        self.worker = worker
        self._key: tuple[CudaApi, int] | None = key

    def end(self) -> None:
        """Use it no more; without users its thread ends. Again is nothing.

        To be called when nothing of the user's moves any more. One that was given up
        is kept: its GPU gets no other one in this process.
        """
        key, self._key = self._key, None
        if key is None:
            return
        with _lock:
            self.worker.users -= 1
            if not self.worker.users and self.worker.error is None:
                del _workers[key]
                self.worker.stop()


_making: Final = threading.Lock()
"""Has whoever makes one, which takes its time: who ends a use does not wait for it."""

_lock: Final = threading.Lock()
_workers: Final[dict[tuple[CudaApi, int], DeviceWorker]] = {}


def use_worker(device: Device) -> WorkerUse:
    """Return a use of the worker of ``device``, made if there is none. In a thread.

    :raises GPUUnavailable: CuPy, NCCL, a driver or that GPU is missing
    :raises GPUFailed: the worker was given up, or is blocked by what another link opens
    """
    gpus = device.opened()
    nccl = (gpus.open_nccl or open_nccl)()
    if not isinstance(nccl, NcclApi):
        raise ConfigError(f"{nccl!r} is no NCCL")
    key = gpus.cuda, device.index
    with _making:
        with _lock:
            if (worker := _workers.get(key)) is not None:
                if (why_not := worker.why_not) is not None:
                    raise why_not
                return WorkerUse(key, worker)
        worker = _workers[key] = DeviceWorker(gpus.cuda, nccl, device.index)
        return WorkerUse(key, worker)


async def worker_of(device: Device) -> WorkerUse:
    """As :func:`use_worker`, for an event loop. Cancelled, it is used by nobody."""
    loop = asyncio.get_running_loop()
    opening: asyncio.Future[WorkerUse] = loop.create_future()

    def settle(use: WorkerUse | None, error: Exception | None) -> None:
        if use is not None and opening.cancelled():
            use.end()
        elif use is not None:
            opening.set_result(use)
        elif error is not None and not opening.cancelled():
            opening.set_exception(error)

    def make() -> None:
        use, error = None, None
        try:
            use = use_worker(device)
        except Exception as exc:  # noqa: BLE001 - raised on the loop
            error = exc
        call_on(loop, settle, use, error)

    in_thread(make)
    try:
        return await opening
    except asyncio.CancelledError:
        if not opening.cancelled() and opening.exception() is None:
            opening.result().end()  # it came in the same tick
        raise
