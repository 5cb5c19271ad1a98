from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from asynckv.devices.cuda import DeviceMemory
from asynckv.errors import GPUFailed
from asynckv.transports.nccl.api import NcclApi
from harness.fake_gpus import FakeGpus, FakeProcess
from harness.fake_gpus.communicators import FakeComm


class Rank:
    """One rank on a thread of its own: what is said is done there, in order."""

    def __init__(self, process: FakeProcess, rank: int) -> None:
        self.process, self.rank = process, rank
        self.comm: FakeComm

    def run(self, do: Callable[[], object]) -> Future[object]:
        future: Future[object] = Future()

        def work() -> None:
            self.process.cuda.use_device(self.rank)
            try:
                future.set_result(do())
            except (GPUFailed, KeyError) as exc:
                future.set_exception(exc)

        threading.Thread(target=work, daemon=True).start()
        return future

    def whole(self, unique_id: bytes, way: str, memory: DeviceMemory) -> object:
        """Open, move once, destroy."""
        self.comm = self.process.nccl.open_comm(2, unique_id, self.rank)
        stream, event = self.process.cuda.stream(), self.process.cuda.event()
        move = getattr(self.comm, way)
        move(memory.address, memory.nbytes, 1 - self.rank, stream)
        event.record(stream)
        event.synchronize()
        self.comm.destroy()
        return True


@pytest.fixture
def ranks(near: FakeProcess, far: FakeProcess) -> tuple[Rank, Rank]:
    return Rank(near, 0), Rank(far, 1)


def test_it_fits_the_seam(near: FakeProcess) -> None:
    nccl: NcclApi = near.nccl
    assert nccl.version() == 22809


@pytest.mark.parametrize("sockets", [False, True])
def test_bytes_go_from_rank_to_rank(sockets: bool) -> None:
    gpus = FakeGpus(2, sockets=sockets, max_delay=3)
    ranks = [Rank(gpus.process(), rank) for rank in range(2)]
    memory = [rank.process.cuda.malloc(1000) for rank in ranks]
    ranks[0].process.cuda.view(memory[0])[:] = 7
    unique_id = ranks[0].process.nccl.unique_id()
    sent = ranks[0].run(lambda: ranks[0].whole(unique_id, "send", memory[0]))
    got = ranks[1].run(lambda: ranks[1].whole(unique_id, "receive", memory[1]))
    assert sent.result(5) and got.result(5)
    assert (ranks[1].process.cuda.view(memory[1]) == 7).all()
    gpus.close()
    assert not gpus.faults


def test_the_first_group_waits_for_the_peer(
    gpus: FakeGpus, ranks: tuple[Rank, Rank]
) -> None:
    unique_id, memory = ranks[0].process.nccl.unique_id(), _memory(ranks)
    other = ranks[1].run(lambda: ranks[1].process.nccl.open_comm(2, unique_id, 1))
    sent = ranks[0].run(lambda: ranks[0].whole(unique_id, "send", memory[0]))
    comm = other.result(5)
    gpus.close()
    with pytest.raises(GPUFailed, match="nobody waits any more for the peer's first"):
        sent.result(5)
    del comm


def test_two_sizes_never_match(gpus: FakeGpus, ranks: tuple[Rank, Rank]) -> None:
    unique_id, memory = ranks[0].process.nccl.unique_id(), _memory(ranks)
    short = memory[1].part(0, 5)
    sent = ranks[0].run(lambda: ranks[0].whole(unique_id, "send", memory[0]))
    got = ranks[1].run(lambda: ranks[1].whole(unique_id, "receive", short))
    with pytest.raises(TimeoutError):
        sent.result(0.05)
    gpus.close()
    for future in (sent, got):
        with pytest.raises(GPUFailed, match="an event"):
            future.result(5)


def test_one_gpu_has_one_rank(gpus: FakeGpus, near: FakeProcess) -> None:
    unique_id = near.nccl.unique_id()
    ranks = [Rank(near, 0), Rank(gpus.process(), 1)]
    ranks[1].rank = 0

    def open_comm(rank: Rank, number: int) -> object:
        return rank.process.nccl.open_comm(2, unique_id, number)

    first = ranks[0].run(lambda: open_comm(ranks[0], 0))
    second = ranks[1].run(lambda: open_comm(ranks[1], 1))
    for future in (first, second):
        with pytest.raises(GPUFailed, match="Duplicate GPU"):
            future.result(5)


def test_another_thread_must_not_touch_a_communicator(
    gpus: FakeGpus, ranks: tuple[Rank, Rank]
) -> None:
    comm = _opened(ranks)
    for call in (comm.abort, comm.check_async_error):
        with pytest.raises(GPUFailed, match="of another thread"):
            call()
    assert "a communicator was used by another thread" in gpus.faults


def test_nobody_enters_while_a_thread_is_inside(
    gpus: FakeGpus, near: FakeProcess
) -> None:
    unique_id = near.nccl.unique_id()
    waiting = Rank(near, 0).run(lambda: near.nccl.open_comm(2, unique_id, 0))
    with pytest.raises(TimeoutError):
        waiting.result(0.05)
    with pytest.raises(GPUFailed, match="another thread is inside"):
        near.nccl.open_comm(2, unique_id, 1)
    assert gpus.faults == ["a thread opened a communicator while another was inside"]


def test_what_was_aborted_is_used_no_more(ranks: tuple[Rank, Rank]) -> None:
    unique_id = ranks[0].process.nccl.unique_id()

    def use() -> None:
        comm = ranks[0].process.nccl.open_comm(2, unique_id, 0)
        comm.abort()
        comm.check_async_error()

    ranks[1].run(lambda: ranks[1].process.nccl.open_comm(2, unique_id, 1))
    with pytest.raises(GPUFailed, match="has ended"):
        ranks[0].run(use).result(5)


@pytest.mark.parametrize("error", [GPUFailed("remote", code=6), KeyError(7)])
def test_an_error_is_found_by_who_looks(
    ranks: tuple[Rank, Rank], error: Exception
) -> None:
    unique_id = ranks[0].process.nccl.unique_id()

    def look() -> None:
        comm = ranks[0].process.nccl.open_comm(2, unique_id, 0)
        ranks[0].process.nccl.async_error = error
        try:
            comm.check_async_error()
        finally:
            comm.abort()

    ranks[1].run(lambda: ranks[1].process.nccl.open_comm(2, unique_id, 1))
    with pytest.raises(type(error)):
        ranks[0].run(look).result(5)


def test_memory_is_not_freed_while_an_operation_waits_for_its_peer(
    gpus: FakeGpus, ranks: tuple[Rank, Rank]
) -> None:
    unique_id, memory = ranks[0].process.nccl.unique_id(), _memory(ranks)
    spare = ranks[1].process.cuda.malloc(1)
    short = memory[1].part(0, 5)
    ranks[0].run(lambda: ranks[0].whole(unique_id, "send", memory[0]))
    got = ranks[1].run(lambda: ranks[1].whole(unique_id, "receive", short))
    with pytest.raises(TimeoutError):
        got.result(0.05)
    ranks[1].process.cuda.use_device(1)
    ranks[1].process.cuda.free(spare)
    assert "memory was freed while an operation waits" in gpus.faults[0]


def _memory(ranks: tuple[Rank, Rank]) -> list[DeviceMemory]:
    return [rank.process.cuda.malloc(10) for rank in ranks]


def _opened(ranks: tuple[Rank, Rank]) -> FakeComm:
    unique_id = ranks[0].process.nccl.unique_id()
    opened = [
        rank.run(lambda rank=rank: rank.process.nccl.open_comm(2, unique_id, rank.rank))  # type: ignore[misc]
        for rank in ranks
    ]
    comms = [future.result(5) for future in opened]
    assert all(isinstance(comm, FakeComm) for comm in comms)
    assert isinstance(comms[0], FakeComm)
    return comms[0]
