from __future__ import annotations

import pytest

from harness.cancellations.connectors.store_grounds import open_store_ground


async def test_a_prompt_goes_through_the_store() -> None:
    async with open_store_ground("mem") as ground:
        keys = ground.new_keys()
        assert keys != ground.new_keys() and len(keys) == 3
        await ground.save(keys)
        await ground.load(keys)
        await ground.check_quiet()
        with pytest.raises(AssertionError, match="not stored any more"):
            await ground.load(keys)
