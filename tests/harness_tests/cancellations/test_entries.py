from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import torch

from harness.cancellations.entries import Entries, expect_overwritten
from harness.cancellations.grounds import Ground, open_ground


@pytest.fixture
async def ground() -> AsyncIterator[Ground]:
    async with open_ground("local") as ground:
        yield ground


@pytest.fixture
def entries(ground: Ground) -> Entries:
    return Entries(ground, 100)


async def test_an_entry_is_in_until_it_is_taken(
    ground: Ground, entries: Entries
) -> None:
    entries.begin()
    await entries.insert(ground.producer)
    entries.expect_in(True)
    expect_overwritten(entries.key)
    await entries.take(ground.consumer)
    entries.expect_in(False)
    expect_overwritten(entries.into)


async def test_a_lost_entry_is_told(ground: Ground, entries: Entries) -> None:
    await entries.bring()
    await ground.local.withdraw(entries.name)
    with pytest.raises(AssertionError, match="0 entries, 0 acknowledged"):
        entries.expect_in(True)


async def test_an_entry_that_is_there_and_was_taken_is_told(
    ground: Ground, entries: Entries
) -> None:
    await entries.bring()
    await entries.clear(ground.consumer)
    with pytest.raises(AssertionError, match="0 entries, 1 acknowledged"):
        entries.expect_in(True)


async def test_other_bytes_are_told(ground: Ground, entries: Entries) -> None:
    entries.begin()
    wrong = torch.zeros(100, dtype=torch.uint8)
    await ground.local.insert([1], None, wrong, None, None, entry_id=entries.name)
    with pytest.raises(AssertionError, match="with its bytes"):
        await entries.take(ground.consumer)


async def test_another_entry_is_told(ground: Ground, entries: Entries) -> None:
    await entries.bring()
    entries.begin()
    with pytest.raises(AssertionError, match="is not"):
        await entries.take(ground.consumer)


def test_memory_that_was_written_to_is_told() -> None:
    with pytest.raises(AssertionError, match="was written to"):
        expect_overwritten(torch.zeros(3))
