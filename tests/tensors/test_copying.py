"""Copies between neighbours in memory: what they copy, and by how many calls."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Generator
from typing import Any

import anyio
import numpy
import pytest
import torch

from asynckv.devices.copying import CopyPool
from asynckv.protocol.wire import digest_of
from asynckv.tensors import copying, jobs as module
from asynckv.tensors.copying import HostCopyPool
from asynckv.tensors.jobs import CopyJob, RunsCopy, long_copies, run_jobs
from asynckv.tensors.runs import Runs, joined, runs_at, runs_in
from asynckv.tensors.views import bytes_of, empty_tensor
from asynckv.testing.blocked import until
from asynckv.types import TensorSpec

_LARGE = 48 * 2**20


@pytest.fixture
async def pool() -> AsyncIterator[HostCopyPool]:
    pool = HostCopyPool()
    yield pool
    pool.close()
    await _until_no_thread_is_left()


async def _until_no_thread_is_left() -> None:
    async with asyncio.timeout(5):
        while any("asynckv-copy" in thread.name for thread in threading.enumerate()):  # noqa: ASYNC110
            await asyncio.sleep(0)


def _random(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


async def _cancel_by_task(copy: Coroutine[Any, Any, object], one: torch.Tensor) -> None:
    task = asyncio.create_task(copy)
    await _until_written(one)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _cancel_by_scope(
    copy: Coroutine[Any, Any, object], one: torch.Tensor
) -> None:
    async def run_in_scope() -> None:
        with scope:
            await copy

    scope = anyio.CancelScope()
    task = asyncio.create_task(run_in_scope())
    await _until_written(one)
    scope.cancel()
    await task
    assert scope.cancelled_caught


async def _until_written(element: torch.Tensor) -> None:
    while not element:  # noqa: ASYNC110
        await asyncio.sleep(0)


@pytest.mark.parametrize("nbytes", [0, 1, 65536, 65537, 2**20, 5 * 2**20 + 3])
async def test_a_copy_has_the_bytes_and_their_digest(
    pool: HostCopyPool, nbytes: int
) -> None:
    source, target = _random(nbytes), torch.zeros(nbytes, dtype=torch.uint8)
    digests = await pool.copy([source], [target])
    assert torch.equal(source, target)
    assert digests == [digest_of(bytes_of(source))]


@pytest.mark.parametrize("rows", [0, 3, 600, 5000])
@pytest.mark.parametrize("dtype", ["bfloat16", "bool", "complex64", "float8_e5m2"])
async def test_strided_sources_become_dense(
    pool: HostCopyPool, rows: int, dtype: str
) -> None:
    source = empty_tensor(TensorSpec((256, 3, rows), dtype))
    bytes_of(source)[:] = bytes(source.nbytes)
    bytes_of(source)[::7] = b"\1" * len(range(0, source.nbytes, 7))
    target = empty_tensor(TensorSpec((rows, 3, 256), dtype))
    (digest,) = await pool.copy([source.permute(2, 1, 0)], [target])
    assert bytes_of(target.permute(2, 1, 0).contiguous()) == bytes_of(source)
    assert digest == digest_of(bytes_of(target))
    assert await pool.digest([source.permute(2, 1, 0)]) == [digest]


@pytest.mark.parametrize("rows", [2, 600, 5000])
async def test_whatever_is_copied_may_land_in_several_places(
    pool: HostCopyPool, rows: int
) -> None:
    source = _random(256 * 3 * rows).view(256, 3, rows)
    base = bytearray(2 * source.nbytes)
    middle = source.nbytes + source.nbytes // 3
    spans = [(middle, 2 * source.nbytes), (0, 7), (source.nbytes, middle - 7)]
    place = runs_at(memoryview(base), spans)
    assert isinstance(place, Runs)
    dense = torch.empty_like(source)
    for one in (source, source.permute(2, 1, 0)):
        digests = await pool.copy([one], [place])
        assert joined(place) == bytes_of(one.contiguous())
        assert await pool.copy([place], [dense]) == digests
        assert bytes_of(dense) == joined(place)
        assert digests == [digest_of(joined(place))]


async def test_one_row_larger_than_a_piece_is_split(pool: HostCopyPool) -> None:
    source = torch.arange(2 * 2**20).view(1, 2, 1024, 1024).transpose(2, 3)
    target = torch.zeros_like(source, memory_format=torch.contiguous_format)
    await pool.copy([source], [target])
    assert torch.equal(source, target)


async def test_lazy_conjugates_and_negatives_are_resolved(pool: HostCopyPool) -> None:
    lazy = torch.full((20000,), 1 + 2j).conj()
    targets = [torch.zeros(20000, dtype=lazy.dtype), torch.zeros(20000)]
    await pool.copy([lazy, lazy.imag], targets)
    assert targets[0][9] == 1 - 2j
    assert targets[1][9] == -2


async def test_many_tensors_keep_their_order(pool: HostCopyPool) -> None:
    sources = [_random(100_000 * (index % 3)) for index in range(60)]
    targets = [torch.zeros_like(source) for source in sources]
    digests = await pool.copy(sources, targets)
    assert all(map(torch.equal, sources, targets))
    assert digests == [digest_of(bytes_of(source)) for source in sources]
    assert await pool.digest(sources) == digests


async def test_digests_can_be_left_out(pool: HostCopyPool) -> None:
    large = _random(2**20)
    assert await pool.copy([large], [torch.zeros_like(large)], digest=False) == [b""]


async def test_parameters_and_inference_tensors_can_be_targets(
    pool: HostCopyPool,
) -> None:
    with torch.inference_mode():
        inference = torch.zeros(50_000)
    parameter = torch.nn.Parameter(torch.zeros(50_000))
    source = torch.ones(50_000, 2, requires_grad=True)[:, 0]
    await pool.copy([source, source], [inference, parameter])
    assert inference.sum() == parameter.sum() == 50_000


async def test_calls_share_the_threads(pool: HostCopyPool) -> None:
    large = _random(_LARGE)
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(pool.copy([large], [torch.zeros_like(large)]))
            group.create_task(pool.digest([large[: 2**20]]))


async def test_small_copies_start_no_thread(pool: HostCopyPool) -> None:
    await pool.copy([torch.ones(10)], [torch.zeros(10)])
    assert not any("asynckv-copy" in t.name for t in threading.enumerate())


@pytest.mark.parametrize("rows", [1, 2**20])
async def test_a_misfit_is_a_value_error(pool: HostCopyPool, rows: int) -> None:
    with pytest.raises(ValueError, match="cannot be copied into"):
        await pool.copy([torch.zeros(rows)], [torch.zeros(rows + 1)])
    with pytest.raises(ValueError, match="not contiguous"):
        await pool.copy([torch.zeros(rows, 2)], [torch.zeros(rows, 4)[:, ::2]])
    with pytest.raises(ValueError, match="bytes are not"):
        place = runs_at(memoryview(bytearray(99)), [(8, 14), (2, 3)])
        await pool.copy([place], [torch.zeros(rows)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="1 sources and 0 targets"):
        await pool.copy([torch.zeros(rows)], [])


@pytest.mark.parametrize("cancel", [_cancel_by_task, _cancel_by_scope])
async def test_after_a_cancelled_copy_nothing_reads_the_source(
    pool: HostCopyPool, cancel: Any
) -> None:
    sources = [torch.ones(_LARGE, dtype=torch.uint8) for _ in range(3)]
    targets = [torch.zeros_like(source) for source in sources]
    await cancel(pool.copy(sources, targets), targets[0][0])
    for source in sources:
        source.fill_(2)
    landed = [int(target.sum()) for target in targets]
    assert max(int(target.max()) for target in targets) == 1
    await pool.digest([sources[0][: 2**20]])
    assert landed == [int(target.sum()) for target in targets]
    assert sum(landed) < 3 * _LARGE


async def test_a_call_cancelled_before_a_thread_took_it_ends(
    pool: HostCopyPool,
) -> None:
    large = _random(_LARGE)
    others = [asyncio.create_task(pool.digest([large] * 8)) for _ in range(8)]
    last = asyncio.create_task(pool.digest([large]))
    await asyncio.sleep(0)
    last.cancel()
    await asyncio.wait({last})
    assert last.cancelled()
    assert not all(other.done() for other in others)
    await asyncio.gather(*others)


async def _copy_with_so_many_threads(
    pool: HostCopyPool, count: int, monkeypatch: pytest.MonkeyPatch
) -> torch.Tensor:
    start, started = threading.Thread.start, list[threading.Thread]()

    def refuse(thread: threading.Thread) -> None:
        if len(started) == count:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    source, target = _random(_LARGE), torch.empty(_LARGE, dtype=torch.uint8)
    await pool.copy([source], [target])
    return target == source


async def test_where_only_one_thread_can_be_started_it_does_the_work(
    pool: HostCopyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await _copy_with_so_many_threads(pool, 1, monkeypatch)).all()


async def test_where_no_thread_can_be_started_the_copy_fails_and_the_next_works(
    pool: HostCopyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="thread"):
        await _copy_with_so_many_threads(pool, 0, patch)
    assert (await _copy_with_so_many_threads(pool, 2, monkeypatch)).all()


async def test_a_closed_pool_finishes_what_is_under_way() -> None:
    pool = HostCopyPool()
    large = _random(_LARGE)
    digests = asyncio.create_task(pool.digest([large]))
    await asyncio.sleep(0)
    pool.close()
    assert await digests == [digest_of(bytes_of(large))]
    with pytest.raises(RuntimeError, match="closed"):
        await pool.digest([large])
    await _until_no_thread_is_left()


def test_a_loop_that_ends_in_mid_copy_leaves_no_thread() -> None:
    pool = HostCopyPool()
    large = _random(_LARGE)

    async def start_and_leave() -> None:
        task = asyncio.ensure_future(pool.digest([large]))
        await asyncio.sleep(0)
        assert not task.done()

    asyncio.run(start_and_leave())
    pool.close()
    asyncio.run(_until_no_thread_is_left())


async def test_a_closed_pool_frees_what_it_is_given_at_once() -> None:
    pool = HostCopyPool()
    pool.close()
    tensors = [torch.zeros(2**20)]
    pool.free(tensors)
    assert tensors == []


class _Niceness(CopyJob):
    found: int | None = None
    nbytes = 2**20

    def steps(self) -> Generator[None, None, None]:
        thread = threading.get_native_id()
        self.found = os.getpriority(os.PRIO_PROCESS, thread)
        yield


async def test_copies_are_less_urgent_than_the_loop() -> None:
    pool, job = HostCopyPool(), _Niceness()
    before = os.getpriority(os.PRIO_PROCESS, 0)
    await pool.run([job])
    pool.close()
    assert job.found == min(before + 3, 19)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


async def test_many_bytes_are_freed_in_a_thread(pool: HostCopyPool) -> None:
    tensors = [torch.zeros(2**20)]
    pool.free(tensors)
    await until(lambda: not tensors)


class _Threads(CopyJob):
    """Notes how many threads of pools there are."""

    found = 0
    nbytes = 2**20

    def steps(self) -> Generator[None, None, None]:
        names = [thread.name for thread in threading.enumerate()]
        self.found = sum(name.startswith("asynckv-copy") for name in names)
        yield


async def test_threads_that_ended_for_want_of_work_come_again_and_no_more_of_them(
    pool: HostCopyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again = _Threads(), _Threads()
    with monkeypatch.context() as patch:
        patch.setattr(copying, "_IDLE_S", 0.01)
        await pool.run([first])
        await _until_no_thread_is_left()
    await pool.run([again])
    assert 1 <= again.found <= first.found


KIB, MIB = 2**10, 2**20


def parts(memory: torch.Tensor, *places: tuple[int, int]) -> list[torch.Tensor]:
    return [memory[start : start + nbytes] for start, nbytes in places]


def some(nbytes: int) -> torch.Tensor:
    return torch.arange(nbytes).to(torch.uint8)


def test_neighbours_are_copied_by_one_call() -> None:
    source, target = some(12 * KIB), torch.zeros(12 * KIB, dtype=torch.uint8)
    places = [(0, 4 * KIB), (4 * KIB, KIB), (5 * KIB, 7 * KIB)]
    (job,) = long_copies(parts(source, *places), parts(target, *places))
    assert job.nbytes == 12 * KIB
    run_jobs([job])
    assert torch.equal(target, source)


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ([(0, KIB), (KIB, KIB)], [(0, KIB), (2 * KIB, KIB)]),
        ([(0, KIB), (2 * KIB, KIB)], [(0, KIB), (KIB, KIB)]),
        ([(KIB, KIB), (0, KIB)], [(KIB, KIB), (0, KIB)]),
    ],
)
def test_what_lies_apart_on_either_side_is_copied_apart(
    here: list[tuple[int, int]], there: list[tuple[int, int]]
) -> None:
    source, target = some(3 * KIB), torch.zeros(3 * KIB, dtype=torch.uint8)
    sources, targets = parts(source, *here), parts(target, *there)
    jobs = long_copies(sources, targets)
    assert len(jobs) == 2
    run_jobs(jobs)
    assert all(torch.equal(a, b) for a, b in zip(sources, targets, strict=True))
    assert int(target.count_nonzero()) == sum(int(a.count_nonzero()) for a in sources)


def test_what_is_long_is_copied_in_two_halves() -> None:
    source, target = some(5 * MIB + 1), torch.zeros(5 * MIB + 1, dtype=torch.uint8)
    jobs = long_copies([source], [target])
    assert [job.nbytes for job in jobs] == [5 * MIB // 2 + 4 * KIB, 5 * MIB // 2 - 4095]
    run_jobs(jobs)
    assert torch.equal(target, source)


def test_no_call_is_longer_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LONGEST_NBYTES", MIB)
    source, target = some(5 * MIB), torch.zeros(5 * MIB, dtype=torch.uint8)
    jobs = long_copies([source], [target])
    assert [job.nbytes for job in jobs] == [MIB] * 5
    run_jobs(jobs)
    assert torch.equal(target, source)


def test_empty_tensors_part_no_neighbours() -> None:
    source, target = some(2 * KIB), torch.zeros(2 * KIB, dtype=torch.uint8)
    nothing = torch.empty(0, dtype=torch.uint8)
    halves = [(0, KIB), (KIB, KIB)]
    sources, targets = parts(source, *halves), parts(target, *halves)
    sources.insert(1, nothing)
    targets.insert(1, nothing)
    (job,) = long_copies([nothing, *sources], [nothing, *targets])
    run_jobs([job])
    assert torch.equal(target, source)


def test_other_sizes_are_refused_before_anything_is_copied() -> None:
    source, target = some(2 * KIB), torch.zeros(KIB, dtype=torch.uint8)
    with pytest.raises(ValueError, match="2048 bytes are not 1024"):
        long_copies([source], [target])


async def test_memory_lives_as_long_as_its_job() -> None:
    pool = CopyPool()
    target = torch.zeros(3 * MIB, dtype=torch.uint8)
    expected = some(3 * MIB)
    await pool.run(long_copies([expected.clone()], [target]))
    assert torch.equal(target, expected)
    pool.close()


@pytest.mark.parametrize("nbytes", [KIB, 16 * KIB])
def test_pieces_are_copied_into_blocks_in_their_order(nbytes: int) -> None:
    pool = torch.zeros(128 * nbytes, dtype=torch.uint8)
    starts = numpy.array([3, 9, 10, 2, 77]) * nbytes
    target = runs_in(bytes_of(pool), starts, nbytes)
    assert isinstance(target, Runs)
    assert (target.small_blocks is None) == (nbytes > KIB)
    source = torch.arange(1, 5 * nbytes + 1).to(torch.uint8)
    memory = bytes_of(source)
    job = RunsCopy([memory[: nbytes // 2], memory[nbytes // 2 :]], target)
    assert job.nbytes == 5 * nbytes
    run_jobs([job])
    found = torch.cat([pool[start : start + nbytes] for start in starts.tolist()])
    assert torch.equal(found, source)
    assert int(pool.count_nonzero()) == int(source.count_nonzero())
