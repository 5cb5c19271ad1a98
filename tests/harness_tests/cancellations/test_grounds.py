from __future__ import annotations

from typing import Any

import pytest
import torch

from asynckv.testing.certificates import Authority
from harness.cancellations.grounds import GROUNDS, Kind, open_ground


@pytest.mark.parametrize("kind", GROUNDS)
async def test_both_sides_reach_the_same_buffers(
    kind: Kind, authority: Authority
) -> None:
    options: dict[str, Any] = {"tls": authority.issue()} if kind == "tls" else {}
    async with open_ground(kind, **options) as ground:
        await ground.producer.insert([1], None, torch.ones(1), None, None)
        assert (await ground.consumer.drop_select([1])).key == torch.ones(1)
        await ground.client.put("key", torch.ones(1))
        assert await ground.store.contains(["key"]) == (True,)
        assert ground.is_local == (ground.producer is ground.local)
        assert (ground.pipe is None) == ground.is_local


async def test_torch_has_its_threads_again() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        async with open_ground("local"):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
