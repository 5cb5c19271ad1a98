from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from asynckv.devices import quiet as quiet_gpus
from asynckv.devices.quiet import QuietGpu, quiet_gpu
from harness.fake_gpus import FakeGpus

_LONG_S = 10.0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> QuietGpu:
    """Return one for which everybody waits longer than a test does."""
    monkeypatch.setattr(quiet_gpus, "PATIENCE_S", 2 * _LONG_S)
    return QuietGpu()


class Allocator:
    """A thread that allocates once it may, and goes on when it is told to."""

    def __init__(self, gpu: QuietGpu, patience_s: float = 2 * _LONG_S) -> None:
        self.is_at_it, self.go_on = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._allocate, args=(gpu, patience_s))
        self._thread.start()

    def _allocate(self, gpu: QuietGpu, patience_s: float) -> None:
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


def test_memory_is_allocated_when_no_operation_is_left(gpu: QuietGpu) -> None:
    gpu.begin_operation()
    gpu.begin_operation()
    allocator = Allocator(gpu)
    gpu.end_operation()
    assert not allocator.is_at_it.wait(0.02)
    gpu.end_operation()
    assert allocator.is_at_it.wait(_LONG_S)
    allocator.end()


def test_no_operation_begins_while_somebody_allocates(gpu: QuietGpu) -> None:
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


def test_who_waited_in_vain_keeps_no_operation_waiting(gpu: QuietGpu) -> None:
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


def test_those_who_allocate_do_not_wait_for_each_other(gpu: QuietGpu) -> None:
    allocators = [Allocator(gpu) for _ in range(2)]
    assert all(one.is_at_it.wait(_LONG_S) for one in allocators)
    for one in allocators:
        one.end()


def test_an_error_lets_operations_begin(gpu: QuietGpu) -> None:
    with pytest.raises(OSError, match="no memory"), gpu.allocating():
        raise OSError("no memory")
    gpu.begin_operation()


def test_it_is_one_for_a_gpu_of_a_process(gpus: FakeGpus) -> None:
    cuda, other = gpus.process().cuda, gpus.process().cuda
    assert quiet_gpu(cuda, 0) is quiet_gpu(cuda, 0)
    assert quiet_gpu(cuda, 0) is not quiet_gpu(cuda, 1)
    assert quiet_gpu(cuda, 0) is not quiet_gpu(other, 0)
