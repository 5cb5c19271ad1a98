from __future__ import annotations

import pytest

from asynckv.testing.pairs import SCHEMES, Scheme
from asynckv.testing.pipe_checks.cancelling import CANCELLING_CHECKS
from asynckv.testing.pipe_checks.values import PipeCheck
from asynckv.testing.pipe_pairs import open_pipe_pair


@pytest.mark.both_loops
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("check", CANCELLING_CHECKS, ids=lambda check: check.__name__)
async def test_a_pipe_keeps(check: PipeCheck, scheme: Scheme) -> None:
    async with open_pipe_pair(scheme) as (near, far):
        await check(near, far)
