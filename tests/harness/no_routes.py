"""A side that knows of no other route to a peer than the link, and none to any GPU."""

from __future__ import annotations

from asynckv.devices.copying import CopyPool
from asynckv.sharing.peer_imports import PeerImports
from asynckv.transfers.delivery import ReceiveBudget
from asynckv.transfers.routes import PeerRoutes

__all__ = ("NoRoutes",)


class NoRoutes(PeerRoutes):
    """What it sends is read by ``pool``; what it receives lands in ``budget``."""

    def __init__(
        self, pool: CopyPool | None = None, budget: ReceiveBudget | None = None
    ) -> None:
        super().__init__(
            PeerImports("full", ""), budget or ReceiveBudget(2**30), pool or CopyPool()
        )
