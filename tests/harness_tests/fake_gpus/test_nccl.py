"""What blocks, fails or is undefined in NCCL blocks, fails or is a fault here."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from asynckv.errors import GPUFailed
from harness.cupy_double import NcclError
from harness.fake_gpus import FakeGpus, FakeProcess
from harness.fake_gpus.communicators import FakeComm
from harness.fake_gpus.wires import Meetings


class Rank:
    """One rank on a thread of its own: what is said is done there, in order."""

    def __init__(self, process: FakeProcess, rank: int, device: int) -> None:
        self.process, self.rank, self._device = process, rank, device
        self.memory = process.cuda.malloc(10)

    def run(self, do: Callable[[], object]) -> Future[object]:
        future: Future[object] = Future()

        def work() -> None:
            self.process.cuda.use_device(self._device)
            try:
                future.set_result(do())
            except (GPUFailed, KeyError) as exc:
                future.set_exception(exc)

        threading.Thread(target=work, daemon=True).start()
        return future

    def open(self, unique_id: bytes) -> FakeComm:
        return self.process.nccl.open_comm(2, unique_id, self.rank)

    def move(self, unique_id: bytes, way: str, nbytes: int = 10) -> Future[object]:
        """Open, move once, destroy."""

        def whole() -> object:
            comm, cuda = self.open(unique_id), self.process.cuda
            stream, event = cuda.stream(), cuda.event()
            getattr(comm, way)(self.memory.address, nbytes, 1 - self.rank, stream)
            event.record(stream)
            event.synchronize()
            comm.destroy()
            return True

        return self.run(whole)


@pytest.fixture
def ranks(near: FakeProcess, far: FakeProcess) -> tuple[Rank, Rank]:
    return Rank(near, 0, 0), Rank(far, 1, 1)


@pytest.fixture
def unique_id(near: FakeProcess) -> bytes:
    return near.nccl.unique_id()


@pytest.mark.parametrize("sockets", [False, True])
def test_bytes_go_from_rank_to_rank(sockets: bool) -> None:
    gpus = FakeGpus(2, sockets=sockets, max_delay=3)
    near, far = (Rank(gpus.process(), rank, rank) for rank in range(2))
    near.process.cuda.view(near.memory)[:] = 7
    unique_id = near.process.nccl.unique_id()
    sent, got = near.move(unique_id, "send"), far.move(unique_id, "receive")
    assert sent.result(5) and got.result(5)
    assert (far.process.cuda.view(far.memory) == 7).all()
    gpus.close()
    assert not gpus.faults


def test_the_first_group_waits_for_the_peer(
    gpus: FakeGpus, ranks: tuple[Rank, Rank], unique_id: bytes
) -> None:
    other = ranks[1].run(lambda: ranks[1].open(unique_id))
    sent = ranks[0].move(unique_id, "send")
    comm = other.result(5)
    gpus.close()
    with pytest.raises(GPUFailed, match="nobody waits any more for the peer's first"):
        sent.result(5)
    del comm


def test_two_sizes_never_match_and_nothing_is_freed_meanwhile(
    gpus: FakeGpus, ranks: tuple[Rank, Rank], unique_id: bytes
) -> None:
    near, far = ranks
    spare = far.process.cuda.malloc(1)
    sent, got = near.move(unique_id, "send"), far.move(unique_id, "receive", 5)
    for future in (sent, got):
        with pytest.raises(TimeoutError):
            future.result(0.05)
    far.process.cuda.use_device(1)
    far.process.cuda.free(spare)
    assert "memory was freed while an operation waits" in gpus.faults[0]
    gpus.close()
    for future in (sent, got):
        with pytest.raises(GPUFailed, match="an event"):
            future.result(5)


def test_one_gpu_has_one_rank(
    near: FakeProcess, far: FakeProcess, unique_id: bytes
) -> None:
    ranks = [Rank(near, 0, 0), Rank(far, 1, 0)]
    opening = [rank.run(lambda rank=rank: rank.open(unique_id)) for rank in ranks]  # type: ignore[misc]
    for future in opening:
        with pytest.raises(GPUFailed, match="Duplicate GPU"):
            future.result(5)


def test_another_thread_must_not_touch_a_communicator(
    gpus: FakeGpus, ranks: tuple[Rank, Rank], unique_id: bytes
) -> None:
    opening = [rank.run(lambda rank=rank: rank.open(unique_id)) for rank in ranks]  # type: ignore[misc]
    comm, _ = (future.result(5) for future in opening)
    assert isinstance(comm, FakeComm)
    for call in (comm.abort, comm.check_async_error):
        with pytest.raises(GPUFailed, match="of another thread"):
            call()
    assert "a communicator was used by another thread" in gpus.faults


def test_nobody_enters_while_a_thread_is_inside(
    gpus: FakeGpus, near: FakeProcess, unique_id: bytes
) -> None:
    rank = Rank(near, 0, 0)
    waiting = rank.run(lambda: rank.open(unique_id))
    with pytest.raises(TimeoutError):
        waiting.result(0.05)
    with pytest.raises(GPUFailed, match="another thread is inside"):
        near.nccl.open_comm(2, unique_id, 1)
    assert gpus.faults == ["a thread opened a communicator while another was inside"]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (GPUFailed("remote", code=6), "remote"),
        (KeyError(7), "7"),
        (None, "has ended"),  # by the abort
    ],
    ids=str,
)
def test_an_error_is_found_by_who_looks_and_an_end_too(
    ranks: tuple[Rank, Rank], unique_id: bytes, error: Exception | None, raised: str
) -> None:
    def look() -> None:
        comm = ranks[0].open(unique_id)
        ranks[0].process.nccl.async_error = error
        try:
            if error is not None:
                comm.check_async_error()
        finally:
            comm.abort()
        comm.check_async_error()

    ranks[1].run(lambda: ranks[1].open(unique_id))
    with pytest.raises(type(error or GPUFailed("")), match=raised):
        ranks[0].run(look).result(5)


def test_a_communicator_that_is_left_to_the_collector_is_a_fault(
    gpus: FakeGpus,
) -> None:
    def comm() -> FakeComm:
        meetings = Meetings(by_sockets=False)
        wire = meetings.join(meetings.unique_id(), 0)
        return FakeComm(gpus.process().nccl, wire, 0)

    comm().abort()
    comm().destroy()
    gc.collect()
    assert not gpus.faults
    comm()
    gc.collect()
    assert gpus.faults == ["a communicator was left to the collector"]


def test_codes_above_its_table_are_key_errors_as_in_cupy() -> None:
    with pytest.raises(KeyError, match="7"):
        NcclError(7)
