from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from asynckv.buffers.lookup import LookupBuffer


@pytest.fixture
async def local() -> AsyncIterator[LookupBuffer]:
    async with LookupBuffer("8MiB", drain_s=0) as buffer:
        yield buffer
