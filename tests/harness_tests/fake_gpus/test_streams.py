from __future__ import annotations

import pytest

from asynckv.errors import GPUFailed
from harness.fake_gpus import FakeGpus, FakeProcess


def test_an_event_fires_when_the_work_before_it_has_ended() -> None:
    gpus = FakeGpus(max_delay=5, seed=3)
    cuda = gpus.process().cuda
    memory, stream, event = cuda.malloc(8), cuda.stream(), cuda.event()
    cuda.copy(memory.address, memory.address, 8, stream)
    event.record(stream)
    looks = 0
    while not event.query():
        looks += 1
    assert looks > 0
    assert not stream.work


def test_an_event_that_was_never_recorded_has_fired(near: FakeProcess) -> None:
    assert near.cuda.event().query()


def test_a_stream_waits_for_an_event_of_another() -> None:
    gpus = FakeGpus(max_delay=3, seed=1)
    cuda = gpus.process().cuda
    first, second, event = cuda.stream(), cuda.stream(), cuda.event()
    one, two, three = (cuda.malloc(8) for _ in range(3))
    cuda.view(one)[:] = 9
    cuda.copy(two.address, one.address, 8, first)
    event.record(first)
    second.wait(event)
    cuda.copy(three.address, two.address, 8, second)
    second.synchronize()
    assert cuda.view(three).tolist() == [9] * 8


def test_work_that_fails_fails_all_behind_it(near: FakeProcess) -> None:
    cuda = near.cuda
    memory, stream, event = cuda.malloc(8), cuda.stream(), cuda.event()
    stream.add(_Failing())
    event.record(stream)
    with pytest.raises(GPUFailed, match="broken"):
        event.query()
    with pytest.raises(GPUFailed, match="has failed"):
        cuda.copy(memory.address, memory.address, 8, stream)


class _Failing:
    def run(self) -> bool:
        raise GPUFailed("broken", code=719)


def test_who_asks_while_work_is_done_is_no_hindrance() -> None:
    gpus = FakeGpus()
    stream = gpus.process().cuda.stream()

    class Asking:
        runs = 0

        def run(self) -> bool:
            self.runs += 1
            gpus.progress()  # as a finalizer that the collector calls in between
            return True

    asking = [Asking(), Asking()]
    for work in asking:
        stream.add(work)
    stream.synchronize()
    assert [work.runs for work in asking] == [1, 1]
