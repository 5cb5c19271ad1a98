"""A disk tier keeps what every tier keeps, on a disk and in memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from asynckv.stores.disk import DiskTier
from asynckv.stores.disk.calls import FileCalls
from asynckv.testing.tier_checks import (
    TIER_CHECKS,
    TierCheck,
)
from harness.disk_faults import FaultyCalls


@pytest.mark.both_loops
@pytest.mark.parametrize("check", TIER_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "buffered"])
async def test_a_disk_tier_keeps_the_contract(
    check: TierCheck, is_direct: bool, tmp_path: Path
) -> None:
    calls = FileCalls() if is_direct else FaultyCalls(refuses_direct=True)

    await check(lambda: DiskTier(tmp_path / "kv", 256 * 2**20, calls=calls))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"threads": 0}, ValueError),
        ({"threads": 1.5}, TypeError),
        ({"close_grace_s": math.nan}, ValueError),
        ({"full_retry_s": -1}, ValueError),
    ],
)
def test_options_are_checked(
    options: dict[str, Any], error: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(error, match=f"{next(iter(options))} is"):
        DiskTier(tmp_path / "kv", 2**20, **options)


@pytest.mark.parametrize("max_bytes", [None, math.nan, math.inf, True, [2**20], "lots"])
def test_what_is_no_number_of_bytes_is_no_bound(max_bytes: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bytes|size"):
        DiskTier(tmp_path / "kv", max_bytes)
    assert DiskTier(tmp_path / "kv", "1MiB").max_bytes == 2**20
