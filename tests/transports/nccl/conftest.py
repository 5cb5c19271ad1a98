"""Two GPUs that are not there, and pairs of transports between them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator

import pytest

from asynckv.transports.nccl.directions import NcclSettings
from asynckv.transports.nccl.worker import DeviceWorker
from harness.fake_gpus import FakeGpus
from harness.nccl_pairs import NcclPair

QUICK = NcclSettings(chunk_bytes=64, max_operations=2, patience_s=0.2, open_s=5.0)


@pytest.fixture
def gpus() -> FakeGpus:
    return FakeGpus(2)


@pytest.fixture
async def pair(gpus: FakeGpus) -> AsyncIterator[NcclPair]:
    async with opened(gpus) as made:
        yield made


@pytest.fixture
async def patient_pair(gpus: FakeGpus) -> AsyncIterator[NcclPair]:
    """Return one whose operations may take as long as they like."""
    settings = dataclasses.replace(QUICK, patience_s=1000.0)
    async with opened(gpus, settings) as made:
        yield made


@contextlib.asynccontextmanager
async def opened(
    gpus: FakeGpus, settings: NcclSettings = QUICK
) -> AsyncIterator[NcclPair]:
    lost: list[Exception] = []
    made = NcclPair(
        gpus,
        lost.append,
        lost.append,
        settings=settings,
        stuck_s=0.3,
        abort_grace_s=0.1,
    )
    try:
        await made.open()
        yield made
    finally:
        await made.aclose()


@pytest.fixture
def worker(gpus: FakeGpus) -> Iterator[DeviceWorker]:
    process = gpus.process()
    made = DeviceWorker(process.cuda, process.nccl, 0, stuck_s=0.3, abort_grace_s=0.5)
    yield made
    made.stop()
    gpus.close()
    assert made.join(5)
