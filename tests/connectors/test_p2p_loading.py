from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from asynckv.connectors.p2p_loading import P2PLoading
from asynckv.connectors.p2p_orders import LoadOrder
from asynckv.testing.blocked import until
from asynckv.testing.engines.toy_parts import ToyParts, open_toy_parts

ORDER = LoadOrder("r", "t", "P", ((1, 2),), is_async=False)


@pytest.fixture
async def parts() -> AsyncIterator[ToyParts]:
    async with open_toy_parts("D") as parts:
        yield parts


@pytest.fixture
def loading(parts: ToyParts) -> P2PLoading:
    return P2PLoading(*parts.all, moves=parts.moves)


async def test_a_load_that_cannot_begin_fails_and_nothing_is_raised(
    loading: P2PLoading, parts: ToyParts
) -> None:
    parts.registered = None
    loading.begin(ORDER)
    results = parts.transfers.results()
    assert results.failed_recving == {"r"}
    assert results.invalid_block_ids == {1, 2}
    assert loading.awaited == ()


async def test_a_step_waits_for_its_loads_until_it_is_over(
    loading: P2PLoading, parts: ToyParts
) -> None:
    loading.begin(ORDER)
    assert [load.order for load in loading.awaited] == [ORDER]
    loading.clear()
    assert loading.awaited == ()
    assert parts.transfers.count("recv") == 1


async def test_what_nobody_loads_is_released_beside_the_loads(
    loading: P2PLoading, parts: ToyParts
) -> None:
    loading.begin(LoadOrder("r", "t", "P", ()))
    assert (parts.transfers.count("recv"), parts.transfers.others) == (0, 1)
    await until(lambda: not parts.transfers.others)  # nobody serves there
