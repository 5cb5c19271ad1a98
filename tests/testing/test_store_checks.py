from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from asynckv.abc import KVStoreBuffer
from asynckv.buffers.store import StoreBuffer
from asynckv.testing.store_checks import (
    CANCELLING_CHECKS,
    ROOM_CHECKS,
    STORE_CHECKS,
    STORING_CHECKS,
    StoreCheck,
    check_store_buffer,
    large,
    until_only,
)


async def test_eight_large_values_fit_and_one_is_left() -> None:
    async with StoreBuffer("16MiB") as buffer:
        for number in range(8):
            await buffer.put(str(number), large(buffer))
        assert buffer.statistics().keys == 8
        for number in range(1, 8):
            await buffer.delete(str(number))
        await until_only(buffer, "0")
        await until_only(buffer, "0")


@pytest.mark.both_loops
@pytest.mark.parametrize(
    "check",
    [*STORING_CHECKS, *ROOM_CHECKS, *CANCELLING_CHECKS],
    ids=lambda check: check.__name__,
)
async def test_the_local_buffer_keeps(check: StoreCheck) -> None:
    async with StoreBuffer("16MiB") as buffer:
        await check(buffer, buffer)


pytestmark = pytest.mark.both_loops


@asynccontextmanager
async def local_pair() -> AsyncIterator[tuple[KVStoreBuffer, StoreBuffer]]:
    async with StoreBuffer("16MiB") as buffer:
        yield buffer, buffer


class Forgetful(StoreBuffer):
    """Shows only some of what was put."""

    async def get(
        self, key: str, into: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        value = await super().get(key, into)
        return None if value is None else value.flatten()


@asynccontextmanager
async def broken_pair() -> AsyncIterator[tuple[KVStoreBuffer, StoreBuffer]]:
    async with Forgetful("16MiB") as buffer:
        yield buffer, buffer


async def test_all_checks_run_as_one() -> None:
    await check_store_buffer(local_pair)


async def test_a_buffer_that_breaks_the_contract_is_found_and_the_check_named() -> None:
    with pytest.raises(AssertionError, match="expected a") as caught:
        await check_store_buffer(broken_pair)
    assert caught.value.__notes__ == ["in a_value_comes_back_as_it_was_put"]


def test_every_check_has_a_name_and_says_what_it_is_for() -> None:
    names = [check.__name__ for check in STORE_CHECKS]
    assert len(set(names)) == len(names) == 14
    assert all(check.__doc__ for check in STORE_CHECKS)
