from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import torch

from asynckv.connectors.block_moves import BlockMoves
from asynckv.connectors.caches import PagedCaches
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.options import ConnectorOptions
from asynckv.connectors.p2p_notices import P2PNotices
from asynckv.connectors.p2p_orders import SaveOrder
from asynckv.connectors.p2p_routes import P2PRoutes
from asynckv.connectors.p2p_saving import P2PSaving
from asynckv.connectors.staging import Staging
from asynckv.connectors.transfers import Transfers
from asynckv.errors import GPUFailed
from asynckv.tensors.copying import CopyPool
from asynckv.testing.engines.toy_pairs import pair_configs

ORDER = SaveOrder("r", "t", "D", (1, 2, 3), ((1,),))


class Caches:
    """What moves blocks, and how often it was asked for."""

    def __init__(self) -> None:
        self.pool = CopyPool()
        caches = PagedCaches({"a": torch.zeros(4, 16, 2)}, None, None)
        self.registered = BlockMoves(caches, self.pool)
        self.asked = 0

    def moves(self) -> BlockMoves:
        self.asked += 1
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
def saving(caches: Caches, transfers: Transfers) -> P2PSaving:
    engine = KVEngine(engine_id="P", block_size=16)
    config = pair_configs(["mem://sP"], ["mem://sD"], {"direction": "pull"})[0]
    options, routes = ConnectorOptions.of(config), P2PRoutes(config, engine)
    notices = P2PNotices(transfers, routes, options)
    of_all = engine, options, routes, transfers, notices
    return P2PSaving(*of_all, moves=caches.moves, staging=Staging(2**20))


async def test_where_nothing_is_saved_the_stream_is_not_asked(
    saving: P2PSaving, caches: Caches
) -> None:
    saving.offer("a")
    await saving.begin_to_wait()
    assert not caches.asked


async def test_a_request_is_saved_once_at_a_time(
    saving: P2PSaving, transfers: Transfers
) -> None:
    saving.begin(ORDER)
    saving.begin(ORDER)
    assert transfers.count("send") == 1
    assert transfers.others == 1  # whoever waits for the second is told


async def test_saves_fail_where_a_stream_is_not_known(
    saving: P2PSaving, caches: Caches, transfers: Transfers
) -> None:
    saving.begin(ORDER)
    caches.registered.follow(GPUFailed("it is stuck"))
    with pytest.raises(GPUFailed, match="stuck"):
        await saving.begin_to_wait()
    assert transfers.results().failed_sending == {"r"}
