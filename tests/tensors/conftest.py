"""A process with fake GPUs, and how its memory is staged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from asynckv.tensors.stagings import Stagings
from asynckv.testing.fake_gpus import FakeGpus, FakeProcess
from asynckv.testing.fake_gpus.tensors import FakeTensors

CHUNK_NBYTES = 1024


@pytest.fixture
def process() -> Iterator[FakeProcess]:
    gpus = FakeGpus(2, seed=1, max_delay=3)
    process = gpus.process()
    yield process
    gpus.close()
    assert gpus.faults == []


@pytest.fixture
def tensors(process: FakeProcess) -> FakeTensors:
    return FakeTensors(process)


@pytest.fixture
def stagings(process: FakeProcess, tensors: FakeTensors) -> Iterator[Stagings]:
    found = Stagings(
        lambda: process.cuda, tensors, chunk_nbytes=CHUNK_NBYTES, slots=3, limit_s=5
    )
    yield found
    found.close()
