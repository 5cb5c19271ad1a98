from __future__ import annotations

import asyncio

import pytest
import torch

from asynckv.testing.expectations import (
    expect,
    expect_error,
    expect_same,
    is_same,
    noise,
    only,
)


def test_noise_is_the_same_each_time_and_may_be_overwritten() -> None:
    noise(64, 1).zero_()
    assert is_same(noise(64, 1), noise(64, 1))
    assert not is_same(noise(64, 1), noise(64, 2))


def test_dtype_and_shape_count_too() -> None:
    assert not is_same(noise(8, 0), noise(8, 0).view(torch.int8))
    assert not is_same(noise(8, 0), noise(8, 0).reshape(2, 4))
    assert not is_same(None, noise(8, 0))


def test_a_lazy_conjugate_is_what_it_stands_for() -> None:
    wave = torch.tensor([1 + 2j])
    assert is_same(torch.tensor([1 - 2j]), wave.conj())


def test_what_is_wrong_is_said() -> None:
    expect(True, "nothing")
    with pytest.raises(AssertionError, match="too late"):
        expect(False, "too late")
    with pytest.raises(AssertionError, match=r"expected a torch.uint8 \(8,\).*None"):
        expect_same(None, noise(8, 0))


async def test_an_error_is_returned_or_missed() -> None:
    error = await expect_error(TimeoutError, asyncio.wait_for(asyncio.sleep(9), 0))
    assert isinstance(error, TimeoutError)
    with pytest.raises(AssertionError, match="KeyError was expected"):
        await expect_error(KeyError, asyncio.sleep(0))


def test_one_tensor_is_no_mapping_and_not_nothing() -> None:
    tensor = noise(8, 0)
    assert only(tensor) is tensor
    for other in (None, {"key": tensor}):
        with pytest.raises(AssertionError, match="expected a tensor"):
            only(other)
