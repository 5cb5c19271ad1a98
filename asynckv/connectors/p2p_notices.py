"""What a worker tells its peers of entries that are not needed, or will not come."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

from asynckv.connectors.headers import EntryHeader
from asynckv.connectors.options import ConnectorOptions
from asynckv.connectors.p2p_loads import Source, release
from asynckv.connectors.p2p_orders import LoadOrder, SaveOrder
from asynckv.connectors.p2p_routes import P2PRoutes
from asynckv.connectors.p2p_saves import tell_failure, withdraw
from asynckv.connectors.transfers import Transfers
from asynckv.errors import IncompatiblePeer

__all__ = ("P2PNotices",)

_AT_ONCE: Final = 1024
"""So many may be under way; then the oldest is left to its producer's ``ttl_s``."""


class P2PNotices:
    """Sends them beside everything else: nobody waits for them, none of them raises."""

    def __init__(
        self, transfers: Transfers, routes: P2PRoutes, options: ConnectorOptions
    ) -> None:
        self._transfers, self._routes, self._options = transfers, routes, options

    def release(self, order: LoadOrder) -> None:
        """Nobody here needs it: let who holds it have the memory back. Never waits."""
        try:
            _, sources = self._routes.sources(order)
        except IncompatiblePeer:
            return  # then it was no transfer for this engine
        self.release_all(order, list(sources.values()))

    def release_all(self, order: LoadOrder, sources: Sequence[Source]) -> None:
        """The same, of these entries of it."""
        timeout_s = self._options.load_timeout_s
        for source in sources:
            # Requests may name transfers that there are not: those are waited for.
            self._transfers.begin_untold(
                functools.partial(release, source, order, timeout_s),
                f"release of {order.transfer_id}",
                at_most=_AT_ONCE,
            )

    def withdraw(self, order: SaveOrder) -> None:
        """Nobody will ask for what was saved: have the memory back. Never waits."""
        try:
            targets = self._routes.targets(order)
        except IncompatiblePeer:
            return  # then there is none
        timeout_s = self._options.load_timeout_s
        for target in targets:
            self._transfers.begin_untold(
                functools.partial(withdraw, target, timeout_s),
                f"withdrawal of {order.transfer_id}",
                at_most=_AT_ONCE,
            )

    def tell_failure(self, order: SaveOrder, header: EntryHeader, reason: str) -> None:
        """It was not saved: nobody shall wait for what does not come. Never waits."""
        try:
            targets = self._routes.targets(order)
        except IncompatiblePeer:
            return  # then nobody can wait for it
        tokens, ttl_s = order.token_ids, self._options.ttl_s
        for target in targets:
            self._transfers.begin_untold(
                functools.partial(tell_failure, target, tokens, header, reason, ttl_s),
                f"failure of {order.transfer_id}",
                at_most=_AT_ONCE,
            )
