from __future__ import annotations

import threading
import time
import weakref

import pytest
import torch

from asynckv.errors import GPUFailed
from asynckv.tensors import device_moves
from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.runs import Staged, copied
from asynckv.tensors.slots import SlotState
from asynckv.tensors.staging import Staging
from harness.fake_gpus import FakeProcess
from harness.fake_gpus.cuda import FakeCuda
from harness.fake_gpus.gates import Gate
from harness.fake_gpus.tensors import FakeTensors

_CHUNK = 1000


def _random(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


@pytest.fixture
def staging(process: FakeProcess) -> Staging:
    return Staging(lambda: process.cuda, 0, chunk_nbytes=_CHUNK, slots=2, limit_s=5)


def _in_use(staging: Staging) -> int:
    return sum(slot.state is not SlotState.FREE for slot in staging.table.slots)


def _memory(tensors: FakeTensors, content: torch.Tensor) -> DeviceMemory:
    return tensors.memory_of(tensors.on_gpu(content))


def _read(window: Staged, step: int) -> bytes:
    found, start = b"", 0
    while start < window.nbytes:
        stop = min(start + step, window.reach(start))
        found += b"".join(bytes(piece) for piece in window.pieces(start, stop))
        start = stop
    return found


def _until_no_thread_is_left(staging: Staging) -> None:
    staging.close()
    for thread in threading.enumerate():
        if thread.name.startswith("asynckv-gpu"):
            thread.join(5)
            assert not thread.is_alive()


@pytest.mark.parametrize("nbytes", [0, 1, 999, 1000, 1001, 5500])
@pytest.mark.parametrize("step", [7, 1000, 10_000])
def test_a_gpus_bytes_are_read_as_they_are(
    staging: Staging, tensors: FakeTensors, nbytes: int, step: int
) -> None:
    content = _random(nbytes)
    window = staging.reader(_memory(tensors, content))
    assert _read(window, step) == content.numpy().tobytes()
    window.finish()
    _until_no_thread_is_left(staging)


@pytest.mark.parametrize("nbytes", [0, 1, 999, 1000, 1001, 5500])
@pytest.mark.parametrize("step", [100, 500, 1000])
def test_what_is_written_is_there_when_it_is_finished(
    process: FakeProcess,
    staging: Staging,
    tensors: FakeTensors,
    nbytes: int,
    step: int,
) -> None:
    content, memory = _random(nbytes), _memory(tensors, torch.zeros(nbytes or 1))
    memory = memory.part(0, nbytes)
    window = staging.writer(memory)
    for _ in copied(content.numpy().data, window, step):
        pass
    window.finish()
    assert process.cuda.view(memory).tobytes() == content.numpy().tobytes()
    _until_no_thread_is_left(staging)


def test_a_rest_in_the_middle_keeps_what_was_written(
    process: FakeProcess, staging: Staging, tensors: FakeTensors
) -> None:
    memory = _memory(tensors, torch.zeros(1500, dtype=torch.uint8))
    window = staging.writer(memory)
    for start in range(0, 1500, 300):
        stop = min(start + 300, window.reach(start))
        window.pieces(start, stop)[0][:] = bytes([start // 300 + 1]) * (stop - start)
        window.rest()
        if stop < start + 300:
            rest = start + 300 - stop
            window.pieces(stop, start + 300)[0][:] = bytes([start // 300 + 1]) * rest
            window.rest()
    window.finish()
    expected = [value for value in range(1, 6) for _ in range(300)]
    assert process.cuda.view(memory).tolist() == expected
    _until_no_thread_is_left(staging)


def test_the_next_chunk_is_on_its_way_while_one_is_read(
    staging: Staging, tensors: FakeTensors
) -> None:
    window = staging.reader(_memory(tensors, _random(5000)))
    window.pieces(0, 10)
    assert [slot.start for slot in staging.table.slots if slot.user is window] == [
        0,
        1000,
    ]
    window.wait_until_quiet()
    _until_no_thread_is_left(staging)


def test_nothing_is_read_before_the_callers_stream_is_there(
    process: FakeProcess, staging: Staging, tensors: FakeTensors
) -> None:
    gate = Gate()
    tensors.stream(0).add(gate)
    memory = _memory(tensors, _random(100))
    window = staging.reader(memory)
    read: list[bytes] = []
    thread = threading.Thread(target=lambda: read.append(_read(window, 100)))
    thread.start()
    _until(lambda: staging.table.moving(window) == 1)
    process.gpus.progress()
    process.cuda.view(memory)[:] = 7
    assert not read
    gate.open()
    thread.join(5)
    assert read == [b"\7" * 100]
    window.finish()
    _until_no_thread_is_left(staging)


def test_who_leaves_before_it_is_ready_is_quiet_at_once(
    staging: Staging, tensors: FakeTensors
) -> None:
    tensors.stream(0).add(Gate())
    window = staging.reader(_memory(tensors, _random(100)))
    thread = threading.Thread(target=_swallow, args=(window,))
    thread.start()
    _until(lambda: staging.table.moving(window) == 1)
    window.wait_until_quiet()
    thread.join(5)
    assert _in_use(staging) == 0
    _until_no_thread_is_left(staging)


def test_a_copy_that_does_not_end_is_given_up_and_its_slot_never_used_again(
    process: FakeProcess, tensors: FakeTensors
) -> None:
    staging = Staging(lambda: process.cuda, 0, chunk_nbytes=_CHUNK, limit_s=0.05)
    _occupy(staging, tensors)
    (out,) = [s for s in process.streams.values() if s is not tensors.stream(0)][-1:]
    out.add(Gate())
    window = staging.reader(_memory(tensors, _random(100)))
    with pytest.raises(GPUFailed, match="not ended"):
        window.pieces(0, 100)
    window.wait_until_quiet()
    with pytest.raises(GPUFailed):
        staging.reader(_memory(tensors, _random(100))).pieces(0, 100)
    assert _in_use(staging) == 1
    pinned = [one for one in process.space.allocations() if one.device < 0]
    _until_no_thread_is_left(staging)
    assert sum(not one.is_gone for one in pinned) == 1


def test_who_finds_no_thread_for_a_copy_keeps_no_slot(
    staging: Staging, tensors: FakeTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(device_moves, "_IDLE_S", 0.001)
    _occupy(staging, tensors)
    _until(lambda: not staging.moves._has_thread)
    content = _random(100)
    window = staging.reader(_memory(tensors, content))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            window.pieces(0, 100)
    assert _in_use(staging) == 0
    assert _read(window, 100) == content.numpy().tobytes()
    window.finish()
    _until_no_thread_is_left(staging)


@pytest.mark.parametrize("is_moving", [False, True])
def test_a_window_that_was_left_keeps_no_memory(
    staging: Staging, tensors: FakeTensors, is_moving: bool
) -> None:
    tensor, gate = tensors.on_gpu(_random(100)), Gate()
    if is_moving:
        tensors.stream(0).add(gate)
    window, kept = staging.reader(tensors.memory_of(tensor)), weakref.ref(tensor)
    thread = threading.Thread(
        target=_swallow if is_moving else _read_all, args=(window,)
    )
    thread.start()
    if is_moving:
        _until(lambda: staging.table.moving(window) == 1)
    else:
        thread.join(5)
    del tensor
    assert kept() is not None
    window.leave()
    _until(lambda: kept() is None)
    gate.open()
    thread.join(5)
    _until_no_thread_is_left(staging)


def test_an_error_of_cuda_reaches_who_reads(
    process: FakeProcess, staging: Staging, tensors: FakeTensors
) -> None:
    gate = Gate()
    tensors.stream(0).add(gate)
    window = staging.reader(_memory(tensors, _random(100)))
    gate.fail(GPUFailed("an illegal access", code=700))
    with pytest.raises(GPUFailed, match="illegal access") as caught:
        window.pieces(0, 100)
    assert caught.value.code == 700
    window.wait_until_quiet()
    assert _in_use(staging) == 0
    _until_no_thread_is_left(staging)


def test_without_cuda_every_window_says_so(tensors: FakeTensors) -> None:
    def refuse() -> FakeProcess:
        raise GPUFailed("no driver")

    staging = Staging(refuse, 0)  # type: ignore[arg-type]
    memory = _memory(tensors, _random(10))
    for _ in range(2):
        with pytest.raises(GPUFailed, match="no driver"):
            staging.reader(memory).pieces(0, 10)
    _until_no_thread_is_left(staging)


def test_a_call_of_cuda_that_does_not_return_keeps_nobody_waiting(
    process: FakeProcess, tensors: FakeTensors
) -> None:
    returns = threading.Event()

    def open_late() -> FakeCuda:
        returns.wait(10)
        return process.cuda

    staging = Staging(open_late, 0, limit_s=0.01)
    with pytest.raises(GPUFailed, match="does not let its thread go"):
        staging.reader(_memory(tensors, _random(10))).pieces(0, 10)
    returns.set()
    _until_no_thread_is_left(staging)


def test_more_windows_than_slots_take_turns(
    staging: Staging, tensors: FakeTensors
) -> None:
    contents = [_random(3500) for _ in range(6)]
    windows = [staging.reader(_memory(tensors, content)) for content in contents]
    found: dict[int, bytes] = {}

    def read(number: int) -> None:
        found[number] = _read(windows[number], 700)
        windows[number].finish()

    threads = [threading.Thread(target=read, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert [found[n] for n in range(6)] == [c.numpy().tobytes() for c in contents]
    _until_no_thread_is_left(staging)


def test_who_rests_keeps_no_slot_from_the_others(
    process: FakeProcess, tensors: FakeTensors
) -> None:
    staging = Staging(lambda: process.cuda, 0, chunk_nbytes=_CHUNK, slots=1, limit_s=5)
    memory = [_memory(tensors, _random(10)) for _ in range(2)]
    resting, other = (staging.writer(one) for one in memory)
    resting.pieces(0, 5)[0][:] = b"12345"
    resting.rest()
    thread = threading.Thread(target=other.pieces, args=(0, 10))
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    other.leave()
    resting.pieces(5, 10)[0][:] = b"67890"
    resting.finish()
    assert process.cuda.view(memory[0]).tobytes() == b"1234567890"
    _until_no_thread_is_left(staging)


def test_without_pinned_memory_windows_say_so_and_no_stream_is_left(
    process: FakeProcess,
    staging: Staging,
    tensors: FakeTensors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(nbytes: int) -> None:
        raise GPUFailed("out of memory", code=2)

    window = staging.reader(_memory(tensors, _random(10)))
    before = set(process.streams)
    monkeypatch.setattr(process.cuda, "host_alloc", refuse)
    with pytest.raises(GPUFailed, match="out of memory"):
        window.pieces(0, 10)
    _until_no_thread_is_left(staging)
    assert set(process.streams) == before


def test_pinned_memory_is_given_back_when_it_is_closed(
    process: FakeProcess, staging: Staging, tensors: FakeTensors
) -> None:
    _occupy(staging, tensors)
    pinned = [a for a in process.space.allocations() if a.device < 0]
    assert len(pinned) == 2
    _until_no_thread_is_left(staging)
    assert all(allocation.is_gone for allocation in pinned)


def _occupy(staging: Staging, tensors: FakeTensors) -> None:
    """Use it once: from here on it has its slots and its streams."""
    window = staging.reader(_memory(tensors, _random(10)))
    window.pieces(0, 10)
    window.finish()


def _read_all(window: Staged) -> None:
    window.pieces(0, window.nbytes)


def _swallow(window: Staged) -> None:
    with pytest.raises(RuntimeError):
        window.pieces(0, 100)


def _until(is_so: object) -> None:
    limit_s = time.monotonic() + 5
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < limit_s
        threading.Event().wait(0.001)
