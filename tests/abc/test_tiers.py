"""What tiers are handed says how large it is."""

from __future__ import annotations

import pytest

from asynckv.abc import TierMemory, TierValue, WantedValue


def test_a_value_is_as_long_as_its_header_and_its_bytes() -> None:
    memory = TierMemory(3, (memoryview(b"ab"), memoryview(b"c")))
    assert TierValue("k", b"header", memory).nbytes == 9


def test_a_wanted_value_says_where_it_goes_and_nothing_else() -> None:
    with pytest.raises(TypeError, match="abstract"):
        WantedValue("k")  # type: ignore[abstract]
