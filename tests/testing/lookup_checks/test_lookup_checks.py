"""The local buffer keeps every check, and what checks are made of can say no."""

from __future__ import annotations

import asyncio

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.testing.expectations import expect
from asynckv.testing.lookup_checks.cancelling import CANCELLING_CHECKS
from asynckv.testing.lookup_checks.delivering import DELIVERING_CHECKS, ROOM_CHECKS
from asynckv.testing.lookup_checks.selecting import SELECTING_CHECKS
from asynckv.testing.lookup_checks.streaming import STREAMING_CHECKS
from asynckv.testing.lookup_checks.values import (
    DTYPES,
    LOOKUP_MAX_BYTES,
    LookupCheck,
    empty,
    expect_error,
    noise,
    same,
)

CHECKS = [
    *SELECTING_CHECKS,
    *DELIVERING_CHECKS,
    *ROOM_CHECKS,
    *STREAMING_CHECKS,
    *CANCELLING_CHECKS,
]


@pytest.mark.both_loops
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_local_buffer_keeps(check: LookupCheck) -> None:
    async with LookupBuffer(LOOKUP_MAX_BYTES, drain_s=0) as buffer:
        await check(buffer, buffer, buffer)


@pytest.mark.parametrize(
    ("found", "expected", "is_same"),
    [
        *(
            (noise(64, 1).view(dtype), noise(64, 1).view(dtype), True)
            for dtype in DTYPES
        ),
        (noise(64, 1), noise(64, 2), False),
        (noise(8), noise(8).view(torch.int8), False),
        (noise(8), noise(8).reshape(2, 4), False),
        (None, None, True),
        (None, noise(8), False),
        ({"0": noise(8)}, noise(8), False),
    ],
)
def test_bytes_dtype_and_shape_count(
    found: object, expected: torch.Tensor | None, is_same: bool
) -> None:
    assert same(found, expected) == is_same


async def test_an_error_is_returned_or_missed_and_what_is_wrong_is_said() -> None:
    error = await expect_error(TimeoutError, asyncio.wait_for, asyncio.sleep(9), 0)
    assert isinstance(error, TimeoutError)
    with pytest.raises(AssertionError, match="no KeyError"):
        await expect_error(KeyError, asyncio.sleep, 0)
    expect(True, "nothing")
    with pytest.raises(AssertionError, match="too late"):
        expect(False, "too late")


async def test_a_buffer_that_stays_full_is_not_empty() -> None:
    async with LookupBuffer(LOOKUP_MAX_BYTES, drain_s=0) as buffer:
        await buffer.insert([1], None, None, None, None)
        with pytest.raises(AssertionError, match="not empty"):
            await empty(buffer, timeout_s=0.01)
        await buffer.drop_select([1])
