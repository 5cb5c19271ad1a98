from __future__ import annotations

import pytest

from asynckv.buffers.lookup import LookupBuffer
from asynckv.testing.lookup_checks.delivering import DELIVERING_CHECKS, ROOM_CHECKS
from asynckv.testing.lookup_checks.values import LOOKUP_MAX_BYTES, LookupCheck

CHECKS = [*DELIVERING_CHECKS, *ROOM_CHECKS]


@pytest.mark.both_loops
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_local_buffer_keeps(check: LookupCheck) -> None:
    async with LookupBuffer(LOOKUP_MAX_BYTES, drain_s=0) as buffer:
        await check(buffer, buffer, buffer)
