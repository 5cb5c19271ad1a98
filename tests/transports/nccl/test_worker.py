from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

import pytest

from asynckv.devices.access import gpu_access
from asynckv.devices.cuda import DeviceMemory, Event
from asynckv.devices.names import Device
from asynckv.devices.tensors import Gpus
from asynckv.errors import ConfigError, GPUFailed
from asynckv.testing.blocked import until
from asynckv.testing.cancellation import CancelMode, Outcome, sweep_cancellation
from asynckv.transports.nccl.api import Comm
from asynckv.transports.nccl.worker import (
    DeviceWorker,
    WorkerTurns,
    WorkerUse,
    use_worker,
    worker_of,
)
from asynckv.transports.nccl.worker_pipes import WorkerPipe
from harness.fake_devices import fake_device, fake_device_of
from harness.fake_gpus import FakeGpus


def test_the_first_has_its_turn_at_once_and_the_others_in_line() -> None:
    turns, begun = WorkerTurns(), list[int]()
    first, second, third = (partial(begun.append, number) for number in (1, 2, 3))
    for begin in (first, second, third):
        turns.ask(begin)
    assert begun == [1]
    turns.end(first)
    turns.end(second)
    assert begun == [1, 2, 3]


def test_who_does_not_want_it_any_more_is_passed_over() -> None:
    turns, begun = WorkerTurns(), list[int]()
    first, second = partial(begun.append, 1), partial(begun.append, 2)
    turns.ask(first)
    turns.ask(second)
    turns.end(second)
    turns.end(first)
    turns.end(first)
    assert begun == [1]
    assert turns.count == 0


def test_a_gpu_has_one_worker_however_many_use_it() -> None:
    with fake_device() as gpu:
        one, other = use_worker(gpu.device), use_worker(gpu.device)
        assert one.worker is other.worker
        one.end()
        one.end()
        assert other.worker.run(lambda: None)
        other.end()
        assert not other.worker.run(lambda: None)


def test_the_next_user_gets_another_one() -> None:
    with fake_device() as gpu:
        first = use_worker(gpu.device)
        first.end()
        second = use_worker(gpu.device)
        assert second.worker is not first.worker
        second.end()


def test_an_end_does_not_wait_for_another_gpus_worker_to_be_made(
    two_gpus: FakeGpus,
) -> None:
    def held(nbytes: int) -> DeviceMemory:
        is_made.set()
        assert may_go_on.wait(30)
        return malloc(nbytes)

    process = two_gpus.process()
    ours, theirs = (fake_device_of(process, index) for index in range(2))
    is_made, may_go_on, malloc = (
        threading.Event(),
        threading.Event(),
        process.cuda.malloc,
    )
    use, made = use_worker(ours.device), list[WorkerUse]()
    process.cuda.malloc = held  # type: ignore[method-assign]
    making = threading.Thread(target=lambda: made.append(use_worker(theirs.device)))
    making.start()
    is_made.wait()
    use.end()
    assert not made
    may_go_on.set()
    making.join()
    made[0].end()


def test_one_that_was_given_up_is_the_last() -> None:
    with fake_device() as gpu:
        use = use_worker(gpu.device)
        use.worker.give_up(GPUFailed("it is stuck"))
        use.end()
        with pytest.raises(GPUFailed, match="it is stuck"):
            use_worker(gpu.device)


async def test_what_is_no_nccl_is_refused() -> None:
    with fake_device() as gpu:
        gpus = Gpus(gpu.process.cuda, gpu.tensors, object)
        with pytest.raises(ConfigError, match="is no NCCL"):
            await worker_of(Device(0, lambda: gpus))


async def test_a_cancelled_call_uses_none() -> None:
    with fake_device() as gpu:
        held = use_worker(gpu.device)
        opening = asyncio.create_task(worker_of(gpu.device))
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await asyncio.get_running_loop().run_in_executor(None, lambda: None)
        held.end()


async def test_one_that_comes_in_the_tick_of_a_cancellation_is_let_go() -> None:
    async def check(k: int, mode: CancelMode, outcome: Outcome[WorkerUse]) -> None:
        if outcome.value is not None:
            outcome.value.end()
        await until(lambda: held.worker.users == 1)

    with fake_device() as gpu:
        held = use_worker(gpu.device)
        await sweep_cancellation(
            lambda: worker_of(gpu.device), check, modes=("completion",)
        )
        held.end()


def pipe_of(gpus: FakeGpus, lost: list[Exception]) -> WorkerPipe:
    process = gpus.process()
    return WorkerPipe(
        process.cuda, process.nccl, "send", opened=lambda: None, lost=lost.append
    )


def test_an_end_is_told_once(gpus: FakeGpus) -> None:
    lost: list[Exception] = []
    pipe = pipe_of(gpus, lost)
    for number in range(2):
        pipe.lost(GPUFailed(str(number)))
    assert [str(error) for error in lost] == ["0"]


def test_what_is_not_open_posts_nothing(gpus: FakeGpus) -> None:
    pipe = pipe_of(gpus, [])
    for use in (lambda: pipe.post(0, 1), lambda: pipe.stream):
        with pytest.raises(GPUFailed, match="not open"):
            use()
    assert pipe.async_error() is None


def test_what_is_not_open_ends_without_a_word(gpus: FakeGpus) -> None:
    pipe = pipe_of(gpus, [])
    assert pipe.end_comm(is_aborted=True) is pipe.end_comm(is_aborted=False) is None
    pipe.release()
    assert pipe.mark_if_possible() is None
    assert "<send pipe>" in repr(pipe)


class Moving:
    """A job whose event is under the test's control, and what was told of it."""

    def __init__(self, worker: DeviceWorker, *, deadline: float = math.inf) -> None:
        self.deadline = deadline
        self.told: queue.Queue[object] = queue.Queue()
        self.event = HeldEvent()
        self.error: Exception | None = None
        self._worker = worker

    def issue(self, pipe: WorkerPipe) -> Event:
        if self.error is not None:
            raise self.error
        return self.event

    def settle(self, error: Exception | None) -> None:
        self.told.put(("settled", error, self.event.has_fired, threading.get_ident()))

    def abandon(self, error: Exception) -> None:
        self.told.put(("abandoned", error))

    def outcome(self) -> object:
        """Wait until it is told of, and return how it ended."""
        told = self.told.get(timeout=5)
        return told[0] if isinstance(told, tuple) else told


class HeldEvent:
    """Fires when it is told to."""

    def __init__(self) -> None:
        self.has_fired = False
        self.is_closed = False

    def query(self) -> bool:
        return self.has_fired

    def record(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...

    def export(self) -> bytes:
        return b""

    def close(self) -> None:
        self.is_closed = True


class Pipe(WorkerPipe):
    """One that is open without a peer; ``calls`` are what was done to it."""

    def __init__(self, gpus: FakeGpus, worker: DeviceWorker) -> None:
        self.calls: queue.Queue[object] = queue.Queue()
        super().__init__(
            *(worker.cuda, worker.nccl, "send"),
            opened=lambda: None,
            lost=self.calls.put,
        )
        self.async_failure: Exception | None = None
        self._stream = worker.cuda.stream()

    def async_error(self) -> Exception | None:
        return self.async_failure

    def end_comm(self, *, is_aborted: bool) -> Comm | None:
        if is_aborted:
            self.calls.put("aborted")
        return super().end_comm(is_aborted=is_aborted)


def until_begun(worker: DeviceWorker) -> None:
    """Wait until the thread has begun all that it was told."""
    begun = threading.Event()
    worker.run(begun.set)
    assert begun.wait(5)


def keep(worker: DeviceWorker, returns: threading.Event) -> None:
    """Let the thread be in a call until ``returns``."""

    def call() -> None:
        returns.wait(5)

    worker.run(call)


def test_what_was_not_begun_settles_at_once_when_its_pipe_is_aborted(
    gpus: FakeGpus, worker: DeviceWorker
) -> None:
    pipe, other = Pipe(gpus, worker), Pipe(gpus, worker)
    job, left, returns = Moving(worker), Moving(worker), threading.Event()
    keep(worker, returns)
    worker.issue(pipe, job)
    worker.issue(other, left)
    worker.abort(pipe, GPUFailed("no more"))
    told = job.told.get_nowait()
    assert isinstance(told, tuple) and told[0] == "settled" and left.told.empty()
    returns.set()
    assert pipe.calls.get(timeout=5) == "aborted" and job.told.empty()
    left.event.has_fired = True
    assert left.told.get(timeout=5)


def test_what_has_settled_is_kept_by_nobody(
    gpus: FakeGpus, worker: DeviceWorker
) -> None:
    pipe, job = Pipe(gpus, worker), Moving(worker)
    job.event.has_fired = True
    worker.issue(pipe, job)
    told, gone = job.told, weakref.ref(job)
    assert told.get(timeout=5)
    del job
    deadline = time.monotonic() + 5
    while gone() is not None and time.monotonic() < deadline:
        threading.Event().wait(0.001)
    assert gone() is None


def test_nobody_should_wait_for_one_that_is_long_in_a_call(
    worker: DeviceWorker,
) -> None:
    returns = threading.Event()
    worker._blocked_s = 0.01
    assert not worker.is_blocked and worker.why_not is None
    keep(worker, returns)
    while not worker.is_blocked:
        threading.Event().wait(0.005)
    assert "waits in NCCL" in str(worker.why_not) and worker.error is None
    returns.set()
    until_begun(worker)
    while worker.is_blocked:
        threading.Event().wait(0.005)
    assert worker.why_not is None


def test_everything_is_done_on_one_thread(worker: DeviceWorker) -> None:
    seen: queue.Queue[int] = queue.Queue()
    for _ in range(3):
        worker.run(lambda: seen.put(threading.get_ident()))
    threads = {seen.get(timeout=5) for _ in range(3)}
    assert len(threads) == 1 and threads != {threading.get_ident()}


def test_a_job_settles_when_its_event_has_fired(
    gpus: FakeGpus, worker: DeviceWorker
) -> None:
    job = Moving(worker)
    worker.issue(Pipe(gpus, worker), job)
    with pytest.raises(queue.Empty):
        job.told.get(timeout=0.02)
    job.event.has_fired = True
    told = job.told.get(timeout=5)
    assert isinstance(told, tuple) and told[:3] == ("settled", None, True)
    assert job.event.is_closed


def test_others_of_the_process_wait_for_its_operations(
    gpus: FakeGpus, worker: DeviceWorker
) -> None:
    gpu, job, seen = gpu_access(worker.cuda, worker.device), Moving(worker), list[int]()
    worker.issue(Pipe(gpus, worker), job)
    until_begun(worker)
    with gpu.allocating(0):
        seen.append(gpu._allocating)
    job.event.has_fired = True
    assert job.told.get(timeout=5)
    with gpu.allocating(5):
        seen.append(gpu._allocating)
    assert seen == [0, 1]


def test_its_own_memory_is_freed_when_its_operations_have_ended(
    gpus: FakeGpus,
) -> None:
    process = gpus.process()
    worker = DeviceWorker(process.cuda, process.nccl, 0)
    job, freed = Moving(worker), threading.Event()
    process.cuda.free = lambda memory: freed.set()  # type: ignore[method-assign]
    worker.issue(Pipe(gpus, worker), job)
    worker.stop()
    assert not freed.wait(0.02)
    job.event.has_fired = True
    assert worker.join(5) and freed.is_set()


@pytest.mark.parametrize("is_given_up", [False, True])
def test_one_that_did_nothing_frees_its_memory_unless_it_was_given_up(
    gpus: FakeGpus, is_given_up: bool
) -> None:
    process = gpus.process()
    worker, freed = DeviceWorker(process.cuda, process.nccl, 0), threading.Event()
    process.cuda.free = lambda memory: freed.set()  # type: ignore[method-assign]
    if is_given_up:
        until_begun(worker)
        worker.give_up(GPUFailed("stuck"))
    worker.stop()
    assert worker.join(5) and freed.is_set() is not is_given_up


def test_without_memory_there_is_no_worker(gpus: FakeGpus) -> None:
    process = gpus.process()
    process.cuda.malloc = _refuse  # type: ignore[method-assign]
    with pytest.raises(GPUFailed, match="no memory"):
        DeviceWorker(process.cuda, process.nccl, 0)


def _refuse(nbytes: int) -> DeviceMemory:
    raise GPUFailed("no memory is left")


def test_a_pipe_that_fails_to_open_keeps_nobody_from_allocating(
    gpus: FakeGpus, worker: DeviceWorker
) -> None:
    lost = queue.Queue[object]()
    pipe = WorkerPipe(
        *(worker.cuda, worker.nccl, "send"), opened=lambda: None, lost=lost.put
    )
    worker.open(pipe, b"no id")
    assert lost.get(timeout=5)
    with gpu_access(worker.cuda, worker.device).allocating(5):
        assert gpu_access(worker.cuda, worker.device)._allocating == 1


def test_jobs_of_a_pipe_settle_in_order(gpus: FakeGpus, worker: DeviceWorker) -> None:
    pipe, first, second = Pipe(gpus, worker), Moving(worker), Moving(worker)
    for job in (first, second):
        worker.issue(pipe, job)
    second.event.has_fired = True
    with pytest.raises(queue.Empty):
        second.told.get(timeout=0.02)
    first.event.has_fired = True
    assert first.told.get(timeout=5)
    assert second.told.get(timeout=5)


@pytest.mark.parametrize("error", [GPUFailed("remote", code=6), KeyError(7)])
def test_an_async_error_aborts_and_the_memory_is_quiet_first(
    gpus: FakeGpus, worker: DeviceWorker, error: Exception
) -> None:
    pipe, job = Pipe(gpus, worker), Moving(worker)
    pipe.async_failure = error
    worker.issue(pipe, job)
    assert pipe.calls.get(timeout=5) == "aborted"
    job.event.has_fired = True
    told = job.told.get(timeout=5)
    assert isinstance(told, tuple) and told[:3] == ("settled", error, True)
    assert pipe.calls.get(timeout=5) is error


def test_a_deadline_aborts(gpus: FakeGpus, worker: DeviceWorker) -> None:
    pipe, job = Pipe(gpus, worker), Moving(worker, deadline=0.0)
    worker.issue(pipe, job)
    assert pipe.calls.get(timeout=5) == "aborted"
    job.event.has_fired = True
    told = job.told.get(timeout=5)
    assert isinstance(told, tuple) and isinstance(told[1], TimeoutError)


def test_a_job_that_cannot_be_posted_breaks_its_pipe(
    gpus: FakeGpus, worker: DeviceWorker
) -> None:
    pipe, job = Pipe(gpus, worker), Moving(worker)
    job.error = GPUFailed("invalid usage", code=5)
    worker.issue(pipe, job)
    assert pipe.calls.get(timeout=5) == "aborted"
    told = job.told.get(timeout=5)
    assert isinstance(told, tuple) and told[1] is job.error


def test_what_does_not_get_quiet_is_given_up_and_kept(
    gpus: FakeGpus, worker: DeviceWorker
) -> None:
    pipe, job = Pipe(gpus, worker), Moving(worker)
    worker.issue(pipe, job)
    until_begun(worker)
    worker.abort(pipe, GPUFailed("no more"))
    assert job.outcome() == "abandoned"
    assert job in worker.kept
    assert worker.health.startswith("failed: ")
    job.event.has_fired = True
    assert not worker.run(lambda: None)


def test_a_call_that_never_returns_is_given_up(
    gpus: FakeGpus, worker: DeviceWorker
) -> None:
    job, entered = Moving(worker), threading.Event()

    def never() -> None:
        entered.set()
        with contextlib.suppress(GPUFailed):  # the test is over
            gpus.block(lambda: False, "what never comes")

    worker.run(never)
    worker.issue(Pipe(gpus, worker), job)
    assert entered.wait(5)
    while worker.error is None:
        worker.check()
    assert job.outcome() == "abandoned"
    assert "longer than" in worker.health


def test_a_worker_that_is_well_is_not_given_up(worker: DeviceWorker) -> None:
    done = threading.Event()
    worker.run(done.set)
    assert done.wait(5)
    worker.check()
    assert worker.health == "ok" and worker.error is None


def test_a_stopped_worker_abandons_what_comes(
    gpus: FakeGpus, worker: DeviceWorker
) -> None:
    pipe, job = Pipe(gpus, worker), Moving(worker)
    worker.stop()
    worker.issue(pipe, job)
    assert job.outcome() == "abandoned"
    assert not worker.run(lambda: None)


def test_a_pipe_that_is_closed_with_an_operation_under_way_is_aborted(
    gpus: FakeGpus, worker: DeviceWorker
) -> None:
    pipe, job = Pipe(gpus, worker), Moving(worker)
    worker.issue(pipe, job)
    worker.close(pipe)
    assert pipe.calls.get(timeout=5) == "aborted"
    assert job.outcome() == "abandoned"
    assert job in worker.kept


def test_a_pipe_that_is_closed_with_none_is_destroyed(
    gpus: FakeGpus, worker: DeviceWorker
) -> None:
    pipe = Pipe(gpus, worker)
    worker.close(pipe)
    assert isinstance(pipe.calls.get(timeout=5), GPUFailed)


def test_a_worker_whose_command_fails_is_given_up_and_says_so(
    gpus: FakeGpus, worker: DeviceWorker
) -> None:
    job, error = Moving(worker), KeyError(7)

    def fail() -> None:
        raise error

    worker.issue(Pipe(gpus, worker), job)
    worker.run(fail)
    assert job.outcome() == "abandoned"
    assert worker.error is not None and worker.error.__cause__ is error
    assert job in worker.kept


def test_who_cannot_settle_a_job_tells_of_it(
    gpus: FakeGpus, worker: DeviceWorker
) -> None:
    class Unsettled(Moving):
        def settle(self, error: Exception | None) -> None:
            raise BufferError("its memory is not there")

    job = Unsettled(worker)
    job.event.has_fired = True
    worker.issue(Pipe(gpus, worker), job)
    told = job.told.get(timeout=5)
    assert isinstance(told, tuple) and isinstance(told[1], BufferError)


def test_a_stopped_worker_opens_nothing_and_says_so(
    gpus: FakeGpus, worker: DeviceWorker
) -> None:
    pipe = Pipe(gpus, worker)
    worker.stop()
    worker.open(pipe, b"")
    assert isinstance(pipe.calls.get(timeout=5), GPUFailed)


def test_what_was_told_right_before_the_stop_is_done(gpus: FakeGpus) -> None:
    done = threading.Event()

    class Racing(DeviceWorker):
        """Is told something, and stopped, right after it found nothing to do."""

        def _next(self, idle_s: float) -> Callable[[], None] | None:
            if self.run(done.set):
                self.stop()
                return None
            return super()._next(idle_s)

    process = gpus.process()
    worker = Racing(process.cuda, process.nccl, 0)
    worker.run(lambda: None)
    assert worker.join(5) and done.is_set()
