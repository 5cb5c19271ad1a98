"""What tiers are handed says how large it is."""

from __future__ import annotations

import pytest

from asynckv.abc import StoreTier, TierMemory, TierValue, WantedValue


def test_a_value_is_as_long_as_its_header_and_its_bytes() -> None:
    memory = TierMemory(3, (memoryview(b"ab"), memoryview(b"c")))
    assert TierValue("k", b"header", memory).nbytes == 9


@pytest.mark.parametrize("page", [StoreTier, WantedValue])
def test_a_tier_has_to_be_written_by_somebody(page: type) -> None:
    with pytest.raises(TypeError, match="abstract"):
        page("k")
