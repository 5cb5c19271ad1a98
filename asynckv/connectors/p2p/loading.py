"""Which loads of one rank are under way, and which its step waits for."""

from __future__ import annotations

import logging
from collections.abc import Callable

from asynckv.connectors.caches import BlockMoves
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.options import ConnectorOptions
from asynckv.connectors.p2p.load import P2PLoad
from asynckv.connectors.p2p.routes import P2PNotifications, P2PRoutes
from asynckv.connectors.requests import LoadOrder
from asynckv.connectors.transfers import Life, Transfers, reason_of
from asynckv.observability.lines import as_line

__all__ = ("P2PLoading",)

logger = logging.getLogger(__name__)


class P2PLoading:
    """Begins loads; they fail with the peer that they are from.

    ``moves`` returns how blocks move, and raises if there are none yet. An entry that
    a load has not taken is released.
    """

    def __init__(
        self,
        engine: KVEngine,
        options: ConnectorOptions,
        routes: P2PRoutes,
        transfers: Transfers,
        notices: P2PNotifications,
        *,
        moves: Callable[[], BlockMoves],
    ) -> None:
        self.nbytes = 0
        """Of what was loaded."""
        self._engine, self._options, self._moves = engine, options, moves
        self._routes, self._transfers, self._notices = routes, transfers, notices
        self._loads: dict[P2PLoad, Life] = {}
        self._awaited: list[P2PLoad] = []
        routes.call_when_lost(self._on_lost)

    @property
    def awaited(self) -> tuple[P2PLoad, ...]:
        """The loads that the step waits for."""
        return tuple(self._awaited)

    def begin(self, order: LoadOrder) -> None:
        """Begin a load, or release an entry that nobody needs. Never waits.

        What cannot be begun is said to have failed: others are not less wanted.
        """
        try:
            if order.refusal:
                self._refuse(order, order.refusal)
            elif order.block_ids:
                self._begin(order)
            else:
                self._notices.release(order)
        except Exception as exc:
            # Whatever it is: the request would wait for this load for ever.
            logger.exception("no load of %s began", as_line(order.request_id))
            if order.block_ids:
                self._refuse(order, reason_of(exc))

    def abort(self, request_id: str, *, is_wanted: bool) -> None:
        """End a request's load. Its transfer is released unless it ``is_wanted``."""
        for load in self._loads:
            if load.order.request_id == request_id:
                load.is_wanted = is_wanted
        self._transfers.cancel(request_id, "recv")

    def clear(self) -> None:
        """The step is over: it waits for no load any more."""
        self._awaited.clear()

    def _begin(self, order: LoadOrder) -> None:
        timeout_s = self._options.load_timeout_s
        load = P2PLoad(self._engine, self._moves(), order, timeout_s)
        life = self._transfers.begin(
            order.request_id,
            "recv",
            lambda: self._load(load),
            _blocks_of(order),
            lambda: self._ended(load),
        )
        if life is None:
            return
        self._loads[load] = life
        if not order.is_async:
            self._awaited.append(load)

    def _refuse(self, order: LoadOrder, reason: str) -> None:
        self._transfers.refuse(order.request_id, "recv", _blocks_of(order), reason)

    def _on_lost(self, identity: str) -> None:
        """What it was to send will not come.

        Where a request names no peer nobody knows who was to send: others still may.
        """
        for load, life in list(self._loads.items()):
            if not load.order.peer and self._routes.may_come_from_others(identity):
                continue
            rank = load.unseen_rank(identity)
            if rank is not None and not self._routes.has_pushed(load.order, rank):
                reason = f"PeerLost: {as_line(identity)} is gone, or has restarted"
                self._transfers.fail(life, reason)

    def _ended(self, load: P2PLoad) -> None:
        self._loads.pop(load, None)
        load.end()
        # Perhaps its task was cancelled before its first step.
        if not load.has_begun and not load.is_wanted:
            self._notices.release(load.order)

    async def _load(self, load: P2PLoad) -> None:
        try:
            await load.run(*self._routes.sources(load.order))
        finally:
            self.nbytes += load.nbytes
            if not load.is_wanted:
                self._notices.release_all(load.order, load.untaken_sources)


def _blocks_of(order: LoadOrder) -> set[int]:
    return {block for group in order.block_ids for block in group}
