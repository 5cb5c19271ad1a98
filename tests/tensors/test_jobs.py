from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import torch

from asynckv.tensors.copying import CopyPool
from asynckv.tensors.jobs import CopyJob, run_jobs


class _Fill(CopyJob):
    def __init__(self, target: torch.Tensor, error: Exception | None = None) -> None:
        self._target = target
        self._error = error

    @property
    def nbytes(self) -> int:
        return self._target.nbytes

    def steps(self) -> Iterator[None]:
        for part in self._target:
            if self._error is not None:
                raise self._error
            part.fill_(1)
            yield


@pytest.fixture
async def pool() -> AsyncIterator[CopyPool]:
    pool = CopyPool()
    yield pool
    pool.close()


def test_jobs_are_done_one_after_the_other() -> None:
    targets = [torch.zeros(4, requires_grad=True) for _ in range(3)]
    run_jobs(_Fill(target) for target in targets)
    assert all(target.all() for target in targets)


@pytest.mark.parametrize("size", [8, 200_000])
async def test_a_pool_does_all_jobs_small_and_large(pool: CopyPool, size: int) -> None:
    targets = [torch.zeros(2, size) for _ in range(3)]
    await pool.run([_Fill(target) for target in targets])
    assert all(target.all() for target in targets)


@pytest.mark.parametrize("size", [8, 200_000])
async def test_what_a_job_raises_is_raised(pool: CopyPool, size: int) -> None:
    jobs = [_Fill(torch.zeros(2, size)), _Fill(torch.zeros(2, size), ValueError("no"))]
    with pytest.raises(ValueError, match="no"):
        await pool.run(jobs)


async def test_no_jobs_are_no_work(pool: CopyPool) -> None:
    await pool.run([])
