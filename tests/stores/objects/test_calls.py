"""A call of obstore that is given up has let go of the memory it was lent."""

from __future__ import annotations

import asyncio
import random
import sys

import pytest

from asynckv.abc.tiers import TierResult
from asynckv.stores.objects import ObjectTier
from asynckv.stores.objects.calls import ObstoreCalls, Stopped
from asynckv.testing.blocked import until
from asynckv.testing.tier_checks import SomeValue
from harness.moto_server import MotoServer

DONE, FAILED = TierResult.DONE, TierResult.FAILED
CANCELS = 200
NBYTES = 2**20


@pytest.mark.both_loops
@pytest.mark.slow
async def test_of_what_is_overwritten_when_its_put_was_cancelled_nothing_is_torn(
    url: str,
) -> None:
    source = SomeValue("k1/a", NBYTES, 1)
    stored = source.to_store()
    data, other = source.data, bytes(NBYTES)
    async with ObjectTier.from_url(url) as tier:
        for _ in range(CANCELS):
            source.fill(data)
            putting = asyncio.ensure_future(tier.store([stored]))
            await asyncio.sleep(random.random() * 0.01)
            putting.cancel()
            await asyncio.wait({putting})
            source.fill(other)
        wanted = SomeValue("k1/a", NBYTES)
        (result,) = await tier.fetch([wanted])
        assert result is not DONE or wanted.is_one_of(1)
