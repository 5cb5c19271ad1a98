from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from asynckv.devices import access, marks as stream_marks
from asynckv.devices.access import GpuAccess, gpu_access
from asynckv.devices.cuda import Event, Stream
from asynckv.devices.marks import StreamMarks
from asynckv.errors import GPUFailed
from asynckv.testing.blocked import until, until_blocked
from harness.fake_gpus import FakeGpus, FakeProcess
from harness.fake_gpus.gates import Gate
from harness.fake_gpus.streams import FakeStream


@pytest.fixture
async def marks() -> AsyncIterator[StreamMarks]:
    yield (marks := StreamMarks(limit_s=5))
    marks.close()
    await until(lambda: not any("gpu-marks" in t.name for t in threading.enumerate()))


@pytest.fixture
def stream(process: FakeProcess) -> FakeStream:
    return process.cuda.stream()


def mark(process: FakeProcess, stream: FakeStream) -> Event:
    event = process.cuda.event()
    event.record(stream)
    return event


async def test_it_waits_until_the_stream_is_there(
    process: FakeProcess, stream: FakeStream, marks: StreamMarks
) -> None:
    gate = Gate()
    stream.add(gate)
    first = asyncio.create_task(marks.reached(mark(process, stream)))
    await marks.reached(mark(process, process.cuda.stream()))
    await marks.reached(None)
    assert not first.done()
    gate.open()
    await first


async def test_its_thread_ends_when_it_is_closed_and_no_wait_is_left(
    process: FakeProcess, stream: FakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_marks, "_IDLE_S", 60.0)
    gate, marks = Gate(), StreamMarks()
    stream.add(gate)
    waiting = asyncio.create_task(marks.reached(mark(process, stream)))
    await until_blocked(waiting)
    marks.close()
    gate.open()
    await waiting
    await until(lambda: not any("gpu-marks" in t.name for t in threading.enumerate()))


async def test_a_cancelled_wait_ends_at_once(
    process: FakeProcess, stream: FakeStream, marks: StreamMarks
) -> None:
    gate = Gate()
    stream.add(gate)
    waiting = asyncio.create_task(marks.reached(mark(process, stream)))
    await until_blocked(waiting)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    marks.close()
    # Nobody looks at that mark any more.
    await until(lambda: not any("gpu-marks" in t.name for t in threading.enumerate()))
    gate.open()


async def test_a_stream_that_fails_is_said_to(
    process: FakeProcess, stream: FakeStream, marks: StreamMarks
) -> None:
    gate = Gate()
    stream.add(gate)
    failing = asyncio.create_task(marks.reached(mark(process, stream)))
    await until_blocked(failing)
    gate.fail(GPUFailed("an illegal access"))
    with pytest.raises(GPUFailed, match="illegal access"):
        await failing
    await marks.reached(mark(process, process.cuda.stream()))  # others go on


async def test_a_stream_that_does_not_get_on_is_given_up(
    process: FakeProcess, stream: FakeStream
) -> None:
    gate = Gate()
    stream.add(gate)
    with pytest.raises(GPUFailed, match="has not got on"):
        await StreamMarks(limit_s=0.01).reached(mark(process, stream))
    gate.open()
    await until(lambda: not any("gpu-marks" in t.name for t in threading.enumerate()))


class _Late(threading.Condition):
    """One whose waits have just timed out when they are notified."""

    def wait(self, timeout: float | None = None) -> bool:
        super().wait(timeout)
        return False

    @property
    def has_waiter(self) -> bool:
        return bool(self._waiters)  # type: ignore[attr-defined]


async def test_a_wait_that_begins_as_the_thread_would_end_is_served(
    process: FakeProcess, stream: FakeStream, marks: StreamMarks
) -> None:
    marks._changed = late = _Late()
    await marks.reached(mark(process, stream))
    await until(lambda: late.has_waiter)
    await marks.reached(mark(process, stream))


class _Stuck:
    """A mark of a driver that does not answer."""

    def __init__(self) -> None:
        self.answers = threading.Event()

    def query(self) -> bool:
        return self.answers.wait()

    def record(self, stream: Stream) -> None: ...

    def synchronize(self) -> None: ...

    def export(self) -> bytes:
        return b""

    def close(self) -> None: ...


async def test_a_call_of_cuda_that_does_not_return_is_given_up() -> None:
    stuck = _Stuck()
    with pytest.raises(GPUFailed, match="has not got on"):
        await asyncio.wait_for(StreamMarks(limit_s=0.01).reached(stuck), 10)
    stuck.answers.set()
    await until(lambda: not any("gpu-marks" in t.name for t in threading.enumerate()))


_LONG_S = 10.0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> GpuAccess:
    """Return one for which everybody waits longer than a test does."""
    monkeypatch.setattr(access, "PATIENCE_S", 2 * _LONG_S)
    return GpuAccess()


class Allocator:
    """A thread that allocates once it may, and goes on when it is told to."""

    def __init__(self, gpu: GpuAccess, patience_s: float = 2 * _LONG_S) -> None:
        self.is_at_it, self.go_on = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._allocate, args=(gpu, patience_s))
        self._thread.start()

    def _allocate(self, gpu: GpuAccess, patience_s: float) -> None:
        with gpu.allocating(patience_s):
            self.is_at_it.set()
            self.go_on.wait(_LONG_S)

    def end(self) -> None:
        self.go_on.set()
        self._thread.join(_LONG_S)


@pytest.fixture
def gpus() -> Iterator[FakeGpus]:
    gpus = FakeGpus(2)
    yield gpus
    gpus.close()


def test_memory_is_allocated_when_no_operation_is_left(gpu: GpuAccess) -> None:
    gpu.begin_operation()
    gpu.begin_operation()
    allocator = Allocator(gpu)
    gpu.end_operation()
    assert not allocator.is_at_it.wait(0.02)
    gpu.end_operation()
    assert allocator.is_at_it.wait(_LONG_S)
    allocator.end()


def test_no_operation_begins_while_somebody_allocates(gpu: GpuAccess) -> None:
    allocator = Allocator(gpu)
    assert allocator.is_at_it.wait(_LONG_S)
    has_begun = threading.Event()

    def post() -> None:
        gpu.begin_operation()
        has_begun.set()

    thread = threading.Thread(target=post)
    thread.start()
    assert not has_begun.wait(0.02)
    allocator.end()
    assert has_begun.wait(_LONG_S)
    thread.join(_LONG_S)


def test_who_waited_in_vain_keeps_no_operation_waiting(gpu: GpuAccess) -> None:
    gpu.begin_operation()
    allocator = Allocator(gpu, patience_s=0)
    assert allocator.is_at_it.wait(_LONG_S)
    gpu.begin_operation()  # the peer of the first may wait for this one
    gpu.end_operation()
    gpu.end_operation()
    allocator.end()
    again = threading.Thread(target=gpu.begin_operation)
    again.start()
    again.join(5)
    assert not again.is_alive()


def test_those_who_allocate_do_not_wait_for_each_other(gpu: GpuAccess) -> None:
    allocators = [Allocator(gpu) for _ in range(2)]
    assert all(one.is_at_it.wait(_LONG_S) for one in allocators)
    for one in allocators:
        one.end()


def test_an_error_lets_operations_begin(gpu: GpuAccess) -> None:
    with pytest.raises(OSError, match="no memory"), gpu.allocating():
        raise OSError("no memory")
    gpu.begin_operation()


def test_it_is_one_for_a_gpu_of_a_process(gpus: FakeGpus) -> None:
    cuda, other = gpus.process().cuda, gpus.process().cuda
    assert gpu_access(cuda, 0) is gpu_access(cuda, 0)
    assert gpu_access(cuda, 0) is not gpu_access(cuda, 1)
    assert gpu_access(cuda, 0) is not gpu_access(other, 0)
