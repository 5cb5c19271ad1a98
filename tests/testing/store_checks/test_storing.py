from __future__ import annotations

import pytest

from asynckv.buffers.store import StoreBuffer
from asynckv.testing.store_checks.storing import STORING_CHECKS
from asynckv.testing.store_checks.values import StoreCheck


@pytest.mark.both_loops
@pytest.mark.parametrize("check", STORING_CHECKS, ids=lambda check: check.__name__)
async def test_the_local_buffer_keeps(check: StoreCheck) -> None:
    async with StoreBuffer("16MiB") as buffer:
        await check(buffer, buffer)
