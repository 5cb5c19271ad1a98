"""Copies between neighbours in memory: what they copy, and by how many calls."""

from __future__ import annotations

import numpy
import pytest
import torch

from asynckv.devices.copying import CopyPool
from asynckv.tensors import jobs as module
from asynckv.tensors.jobs import RunsCopy, long_copies, run_jobs
from asynckv.tensors.runs import Runs, runs_in
from asynckv.tensors.views import bytes_of

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
