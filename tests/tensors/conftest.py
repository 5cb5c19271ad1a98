"""A pool that copies, and work that is cancelled."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from asynckv.tensors.copying import HostCopyPool
from harness.children import begin

__all__ = ("begin", "pool")


@pytest.fixture
async def pool() -> AsyncIterator[HostCopyPool]:
    pool = HostCopyPool()
    yield pool
    pool.close()
