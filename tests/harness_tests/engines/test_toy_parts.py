from __future__ import annotations

import pytest

from harness.engines.toy_parts import open_toy_parts


async def test_they_are_of_the_side_that_was_named() -> None:
    async with open_toy_parts("P") as prefill, open_toy_parts("D") as decode:
        assert (prefill.engine.engine_id, prefill.routes.serves) == ("P", True)
        assert (decode.engine.engine_id, decode.routes.serves) == ("D", False)


async def test_blocks_cannot_be_moved_that_are_registered_no_more() -> None:
    async with open_toy_parts("D") as parts:
        assert parts.moves().caches.layers == ("a",)
        parts.registered = None
        with pytest.raises(RuntimeError, match="there are none"):
            parts.moves()
        assert parts.asked == 2
