from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import torch

from asynckv.connectors.block_moves import BlockMoves
from asynckv.connectors.caches import PagedCaches
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.options import ConnectorOptions
from asynckv.connectors.p2p_loading import P2PLoading
from asynckv.connectors.p2p_notices import P2PNotices
from asynckv.connectors.p2p_orders import LoadOrder
from asynckv.connectors.p2p_routes import P2PRoutes
from asynckv.connectors.transfers import Transfers
from asynckv.tensors.copying import CopyPool
from asynckv.testing.blocked import until
from asynckv.testing.engines.toy_pairs import pair_configs

ORDER = LoadOrder("r", "t", "P", ((1, 2),), is_async=False)


class Caches:
    """What moves blocks, once it is ``registered``."""

    def __init__(self) -> None:
        self.pool = CopyPool()
        caches = PagedCaches({"a": torch.zeros(4, 16, 2)}, None, None)
        self.registered: BlockMoves | None = BlockMoves(caches, self.pool)

    def moves(self) -> BlockMoves:
        if self.registered is None:
            raise RuntimeError("there are none")
        return self.registered


@pytest.fixture
async def caches() -> AsyncIterator[Caches]:
    caches = Caches()
    yield caches
    caches.pool.close()


@pytest.fixture
async def transfers() -> AsyncIterator[Transfers]:
    transfers = Transfers()
    yield transfers
    await transfers.aclose()


@pytest.fixture
def loading(caches: Caches, transfers: Transfers) -> P2PLoading:
    engine = KVEngine(engine_id="D", block_size=16)
    config = pair_configs(["mem://lP"], ["mem://lD"], {"direction": "pull"})[1]
    options, routes = ConnectorOptions.of(config), P2PRoutes(config, engine)
    notices = P2PNotices(transfers, routes, options)
    of_all = engine, options, routes, transfers, notices
    return P2PLoading(*of_all, moves=caches.moves)


async def test_a_load_that_cannot_begin_fails_and_nothing_is_raised(
    loading: P2PLoading, caches: Caches, transfers: Transfers
) -> None:
    caches.registered = None
    loading.begin(ORDER)
    results = transfers.results()
    assert results.failed_recving == {"r"}
    assert results.invalid_block_ids == {1, 2}
    assert loading.awaited == ()


async def test_a_step_waits_for_its_loads_until_it_is_over(
    loading: P2PLoading, transfers: Transfers
) -> None:
    loading.begin(ORDER)
    assert [load.order for load in loading.awaited] == [ORDER]
    loading.clear()
    assert loading.awaited == ()
    assert transfers.count("recv") == 1


async def test_what_nobody_loads_is_released_beside_the_loads(
    loading: P2PLoading, transfers: Transfers
) -> None:
    loading.begin(LoadOrder("r", "t", "P", ()))
    assert (transfers.count("recv"), transfers.others) == (0, 1)
    await until(lambda: not transfers.others)  # nobody serves there
