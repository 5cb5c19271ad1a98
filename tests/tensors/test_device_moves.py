from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from asynckv.errors import GPUFailed
from asynckv.tensors import device_moves
from asynckv.tensors.cuda import DeviceMemory, PinnedMemory
from asynckv.tensors.device_moves import DeviceMoves, Move, MoveOutcome, free_pinned
from harness.fake_gpus import FakeProcess
from harness.fake_gpus.gates import Gate
from harness.fake_gpus.streams import FakeEvent


class _Told:
    """What a thread of a GPU has said."""

    def __init__(self) -> None:
        self.outcome: MoveOutcome | None = None
        self.error: GPUFailed | None = None
        self._is_in = threading.Event()

    def __call__(self, outcome: MoveOutcome, error: GPUFailed | None) -> None:
        self.outcome, self.error = outcome, error
        self._is_in.set()

    def wait(self) -> MoveOutcome | None:
        assert self._is_in.wait(5)
        return self.outcome


@pytest.fixture
def ends(process: FakeProcess) -> tuple[DeviceMemory, PinnedMemory]:
    return process.cuda.malloc(64), process.cuda.host_alloc(64)


@pytest.fixture
def moves(process: FakeProcess) -> Iterator[DeviceMoves]:
    found = _moves(process)
    yield found
    _end(found)


def _moves(process: FakeProcess, limit_s: float = 5) -> DeviceMoves:
    return DeviceMoves(
        lambda: process.cuda,
        0,
        begin=_nothing,
        end=_nothing,
        failed=_nothing,
        limit_s=limit_s,
    )


def _end(moves: DeviceMoves) -> None:
    moves.close()
    for thread in threading.enumerate():
        if thread.name.startswith("asynckv-gpu"):
            thread.join(5)


def _nothing(_: object) -> None:
    pass


def _move(
    ends: tuple[DeviceMemory, PinnedMemory],
    told: _Told,
    ready: FakeEvent | None = None,
    *,
    is_wanted: bool = True,
) -> Move:
    there, here = ends
    return Move(
        there.address,
        here.address,
        64,
        way="in",
        ready=ready,
        owner=ends,
        is_wanted=lambda: is_wanted,
        told=told,
    )


def _not_yet(process: FakeProcess) -> tuple[Gate, FakeEvent]:
    gate, stream, event = Gate(), process.cuda.stream(), process.cuda.event()
    stream.add(gate)
    event.record(stream)
    return gate, event


def test_a_copy_is_done_when_its_end_is_told(
    process: FakeProcess, moves: DeviceMoves, ends: tuple[DeviceMemory, PinnedMemory]
) -> None:
    told, (there, here) = _Told(), ends
    here.view[:] = bytes(range(64))
    moves.start(_move(ends, told))
    assert told.wait() == "done"
    assert process.cuda.view(there).tobytes() == bytes(range(64))


def test_a_copy_waits_for_what_it_needs_and_nothing_waits_for_it(
    process: FakeProcess, moves: DeviceMoves, ends: tuple[DeviceMemory, PinnedMemory]
) -> None:
    gate, ready = _not_yet(process)
    late, early = _Told(), _Told()
    moves.start(_move(ends, late, ready), _move(ends, early))
    assert early.wait() == "done" and late.outcome is None
    gate.open()
    assert late.wait() == "done"


def test_a_copy_that_nobody_wants_any_more_is_dropped(
    moves: DeviceMoves, ends: tuple[DeviceMemory, PinnedMemory]
) -> None:
    told = _Told()
    moves.start(_move(ends, told, is_wanted=False))
    assert told.wait() == "dropped"


def test_a_copy_whose_source_fails_fails_with_it(
    process: FakeProcess, moves: DeviceMoves, ends: tuple[DeviceMemory, PinnedMemory]
) -> None:
    gate, ready = _not_yet(process)
    gate.fail(GPUFailed("no", code=700))
    told = _Told()
    moves.start(_move(ends, told, ready))
    assert told.wait() == "failed"
    assert told.error is not None and told.error.code == 700


def test_a_copy_that_does_not_end_is_given_up(
    process: FakeProcess, ends: tuple[DeviceMemory, PinnedMemory]
) -> None:
    moves, first, told = _moves(process, limit_s=0.05), _Told(), _Told()
    moves.start(_move(ends, first))
    first.wait()
    for stream in process.streams.values():
        stream.add(Gate())
    moves.start(_move(ends, told))
    assert told.wait() == "given up"
    _end(moves)


def test_a_closed_one_takes_nothing(
    moves: DeviceMoves, ends: tuple[DeviceMemory, PinnedMemory]
) -> None:
    moves.close()
    with pytest.raises(RuntimeError, match="closed"):
        moves.start(_move(ends, _Told()))


def test_freed_pinned_memory_cannot_be_looked_at(process: FakeProcess) -> None:
    pinned = process.cuda.host_alloc(8)
    free_pinned(process.cuda, pinned)
    assert not [one for one in process.space.allocations() if one.device < 0]
    with pytest.raises(ValueError, match="released"):
        bytes(pinned.view)


class _Broken(FakeEvent):
    """An event that cannot be asked, for a reason that nobody foresaw."""

    def query(self) -> bool:
        raise ZeroDivisionError("unforeseen")


def test_whatever_ends_its_thread_all_that_wait_are_told(
    process: FakeProcess, ends: tuple[DeviceMemory, PinnedMemory]
) -> None:
    errors, told = list[Exception](), [_Told() for _ in range(5)]
    moves = DeviceMoves(
        lambda: process.cuda, 0, begin=_nothing, end=_nothing, failed=errors.append
    )
    moves.start(_move(ends, told[0]))
    told[0].wait()
    gate, never = _not_yet(process)
    for stream in process.streams.values():
        stream.add(gate)
    moves.start(_move(ends, told[1]))
    while not moves._moving:
        threading.Event().wait(0.001)
    broken = _Broken(process.gpus)
    waiting = [(told[2], never), (told[3], broken), (told[4], never)]
    moves.start(*(_move(ends, one, ready) for one, ready in waiting))
    expected = ["done", "given up", "dropped", "given up", "dropped"]
    assert [one.wait() for one in told] == expected
    assert [type(error) for error in errors] == [ZeroDivisionError]
    with pytest.raises(RuntimeError, match="closed"):
        moves.start(_move(ends, _Told()))
    gate.open()
    _end(moves)


class _Owner:
    """Keeps memory allocated."""


def test_memory_at_which_the_gpu_may_still_be_is_kept_for_ever(
    process: FakeProcess,
    moves: DeviceMoves,
    ends: tuple[DeviceMemory, PinnedMemory],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(event: FakeEvent, stream: object) -> None:
        raise GPUFailed("the mark was refused")

    monkeypatch.setattr(FakeEvent, "record", refuse)
    told, owner = _Told(), _Owner()
    move, kept = _move(ends, told), weakref.ref(owner)
    move.owner = owner
    moves.start(move)
    assert told.wait() == "given up"  # when it ends nobody will know
    del move, owner, told  # whose error keeps it too
    _end(moves)
    gc.collect()
    assert kept() is not None


def test_who_has_no_thread_is_not_stuck(
    process: FakeProcess,
    ends: tuple[DeviceMemory, PinnedMemory],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_moves, "_IDLE_S", 0.01)
    moves, told, now_s = _moves(process), _Told(), time.monotonic
    moves.start(_move(ends, told))
    assert told.wait() == "done"
    while any(one.name.startswith("asynckv-gpu") for one in threading.enumerate()):
        threading.Event().wait(0.001)
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now_s() + 100)
        assert not moves.is_stuck
    _end(moves)


def test_what_no_thread_could_be_had_for_is_never_copied(
    process: FakeProcess,
    moves: DeviceMoves,
    ends: tuple[DeviceMemory, PinnedMemory],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    refused, told = _Told(), _Told()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            moves.start(_move(ends, refused))
    moves.start(_move(ends, told))
    assert told.wait() == "done" and refused.outcome is None
