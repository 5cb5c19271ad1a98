from __future__ import annotations

import asyncio

import pytest
import torch

from asynckv.buffers.lookup import LookupBuffer
from asynckv.testing.lookup_checks.values import (
    DTYPES,
    LOOKUP_MAX_BYTES,
    borrow,
    cancelled,
    empty,
    expect,
    expect_error,
    fill,
    five_waiting,
    insert,
    noise,
    same,
    until_waiting,
)


def test_noise_is_the_same_each_time_and_fits_every_dtype() -> None:
    assert same(noise(64, 1), noise(64, 1))
    assert not same(noise(64, 1), noise(64, 2))
    for dtype in DTYPES:
        assert same(noise(64).view(dtype), noise(64).view(dtype))


def test_same_compares_dtype_and_shape_too() -> None:
    assert not same(noise(8), noise(8).view(torch.int8))
    assert not same(noise(8), noise(8).reshape(2, 4))
    assert same(None, None)
    assert not same({"0": noise(8)}, noise(8))
    assert not same(None, noise(8))


def test_expect_says_what_is_wrong() -> None:
    expect(True, "nothing")
    with pytest.raises(AssertionError, match="too late"):
        expect(False, "too late")


async def test_expect_error_returns_the_error_or_misses_it() -> None:
    error = await expect_error(TimeoutError, asyncio.wait_for, asyncio.sleep(9), 0)
    assert isinstance(error, TimeoutError)
    with pytest.raises(AssertionError, match="no KeyError"):
        await expect_error(KeyError, asyncio.sleep, 0)


async def test_a_borrow_ends_as_it_is_told() -> None:
    async with LookupBuffer(LOOKUP_MAX_BYTES, drain_s=0) as buffer:
        leave = asyncio.Event()
        leave.set()
        await insert(buffer, 1, entry_id="a")
        await expect_error(LookupError, borrow, buffer, 1, leave, True)
        assert buffer.statistics().entries == 1
        await borrow(buffer, 1, leave)
        await empty(buffer)


async def test_five_inserts_wait_and_can_be_cancelled() -> None:
    async with LookupBuffer(LOOKUP_MAX_BYTES, drain_s=0) as buffer:
        await fill(buffer)
        tasks = await five_waiting(buffer, buffer)
        await until_waiting(buffer, inserts=5)
        for task in tasks:
            await cancelled(task)
        await buffer.drop_select([0])
        await empty(buffer)


async def test_a_buffer_that_stays_full_is_not_empty() -> None:
    async with LookupBuffer(LOOKUP_MAX_BYTES, drain_s=0) as buffer:
        await buffer.insert([1], None, None, None, None)
        with pytest.raises(AssertionError, match="not empty"):
            await empty(buffer, timeout_s=0.01)
        await buffer.drop_select([1])
