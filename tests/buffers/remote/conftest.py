"""Links whose far side answers nothing, or as it is told."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from harness.link_pairs import LinkPair, linked


@pytest.fixture
async def pair() -> AsyncIterator[LinkPair]:
    """A link whose far side hears of everything, and says nothing."""
    async with linked("mem://", lambda *_: None) as pair:
        yield pair
