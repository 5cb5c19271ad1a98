"""What the connector of a vLLM worker does: the engine's thread, beside the loop.

A step that moves nothing costs a few comparisons. A step that does puts its orders on
the loop and goes on; what has ended comes back by the bridge's queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from asynckv.abc.steps import KVConnectorMetadata, KVTransferResults
from asynckv.integrations.bridge import Bridge

if TYPE_CHECKING:
    from asynckv.abc.connectors import KVConnectorWorker
    from asynckv.integrations.vllm.settings import Settings

__all__ = ("WorkerRole",)

logger = logging.getLogger("vllm.asynckv")  # vLLM shows only what is below "vllm"

_START_S: Final = 30.0
_QUIET_S: Final = 10.0
_NOTHING: Final = frozenset[str]()


class WorkerRole:
    """Lets a :class:`~asynckv.abc.KVConnectorWorker` work on a loop of its own."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._bridge = Bridge[KVTransferResults](f"vllm worker {settings.rank}")
        self._connector: KVConnectorWorker | None = None
        self._orders: KVConnectorMetadata | None = None
        self._invalid: set[int] = set()

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the caches, and be there for peers when it returns.

        :raises ConfigError: a cache, or an address, that cannot be used
        """
        self._connector = self._bridge.run(self._start, kv_caches, timeout_s=_START_S)

    def begin_step(self, orders: KVConnectorMetadata | None) -> None:
        """Note what is to be done in this step."""
        self._orders = orders
        if orders is not None and self._connector is not None:
            self._bridge.call(self._connector.bind_connector_metadata, orders)

    def start_loads(self) -> None:
        """Issue the loads of this step."""
        if self._orders is not None and self._connector is not None:
            self._bridge.start(self._connector.start_load_kv)

    def save_layer(self, layer_name: str) -> None:
        """That layer is computed, if this step saves anything."""
        if self._orders is not None and self._connector is not None:
            self._bridge.call(self._connector.save_kv_layer, layer_name)

    def end_step(self) -> None:
        """The forward is over: what has not been saved can be."""
        orders, self._orders = self._orders, None
        if orders is not None:
            self._bridge.start(self._end_step)

    def results(self, finished_req_ids: set[str]) -> Any:
        """Return what has ended; tell the loop what the engine is done with."""
        ended = KVTransferResults()
        for some in self._bridge.news():
            ended |= some
        if finished_req_ids and self._connector is not None:
            self._bridge.call(self._collect, frozenset(finished_req_ids))
        return self._settings.results_of(ended, self._invalid)

    def invalid_blocks(self) -> set[int]:
        """Return the blocks that must not be read, once."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def counts(self) -> dict[str, Any]:
        return {}

    def preempt(self, orders: KVConnectorMetadata | None) -> None:
        """Wait until nothing reads the blocks of preempted requests any more."""

    def shutdown(self) -> None:
        """End everything and join the thread. May be called again."""
        self._bridge.shutdown()

    async def _start(self, kv_caches: Mapping[str, torch.Tensor]) -> KVConnectorWorker:
        connector = self._settings.make_worker()
        connector.register_kv_caches(kv_caches, self._settings.groups)
        connector.call_when_finished(lambda: self._collect(_NOTHING))
        self._worker = connector
        await connector.start()
        self._bridge.start(self._close_at_the_end)
        return connector

    async def _close_at_the_end(self) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await self._worker.shutdown()

    async def _end_step(self) -> None:
        saving = asyncio.ensure_future(self._worker.wait_for_save())
        await asyncio.sleep(0)
        self._worker.clear_connector_metadata()
        await saving

    def _collect(self, finished: frozenset[str]) -> None:
        results = self._worker.get_finished(finished)
        if results:
            self._bridge.tell(results)
