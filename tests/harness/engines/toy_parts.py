"""What a worker's loads and saves are made of, without the worker."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Literal

import torch

from asynckv.connectors.caches import BlockMoves, PagedCaches
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.options import ConnectorOptions
from asynckv.connectors.p2p.routes import P2PNotifications, P2PRoutes
from asynckv.connectors.transfers import Transfers
from asynckv.devices.copying import CopyPool
from harness.engines.toy_pairs import pair_configs

__all__ = ("ToyParts", "open_toy_parts")


class ToyParts:
    """Of P, which prefills, or of D: with one layer of four blocks.

    ``asked`` counts how often somebody wanted to move blocks. Without ``registered``
    nobody can.
    """

    def __init__(self, name: Literal["P", "D"]) -> None:
        urls = [f"mem://toy-parts-{one}" for one in "PD"]
        configs = pair_configs(urls[:1], urls[1:], {"direction": "pull"})
        config = configs["PD".index(name)]
        self.engine = KVEngine(engine_id=name, block_size=16)
        self.options = ConnectorOptions.of(config)
        self.routes = P2PRoutes(config, self.engine)
        self.transfers = Transfers()
        self.notices = P2PNotifications(self.transfers, self.routes, self.options)
        self.pool = CopyPool()
        caches = PagedCaches({"a": torch.zeros(4, 16, 2)}, None, None)
        self.registered: BlockMoves | None = BlockMoves(caches, self.pool)
        self.asked = 0

    @property
    def all(
        self,
    ) -> tuple[KVEngine, ConnectorOptions, P2PRoutes, Transfers, P2PNotifications]:
        """In the order in which loads and saves take them."""
        return self.engine, self.options, self.routes, self.transfers, self.notices

    def moves(self) -> BlockMoves:
        """Return what moves blocks.

        :raises RuntimeError: there are none
        """
        self.asked += 1
        if self.registered is None:
            raise RuntimeError("there are none")
        return self.registered


@contextlib.asynccontextmanager
async def open_toy_parts(name: Literal["P", "D"]) -> AsyncIterator[ToyParts]:
    """Open them; all transfers end with that."""
    parts = ToyParts(name)
    try:
        yield parts
    finally:
        await parts.transfers.aclose()
        parts.pool.close()
