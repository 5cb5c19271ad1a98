"""Two processes that share two GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.fake_gpus import FakeGpus, FakeProcess


@pytest.fixture
def gpus() -> Iterator[FakeGpus]:
    gpus = FakeGpus(2)
    yield gpus
    gpus.close()


@pytest.fixture
def near(gpus: FakeGpus) -> FakeProcess:
    return gpus.process()


@pytest.fixture
def far(gpus: FakeGpus) -> FakeProcess:
    return gpus.process()
