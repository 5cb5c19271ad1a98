"""The worker side of a store connector: one rank's blocks, to and from a store."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, NamedTuple

import anyio
import torch

from asynckv.abc import (
    KVConnectorMetadata,
    KVStoreBuffer,
    KVTransferResults,
)
from asynckv.config import KVTransferConfig
from asynckv.connectors.cache_worker import CacheWorker
from asynckv.connectors.caches import PagedCaches
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.keys import rank_block_keys
from asynckv.connectors.lifecycle import LifeCounters
from asynckv.connectors.spool import Spool
from asynckv.connectors.store_line import StoreLine
from asynckv.connectors.store_orders import StoreMetadata, StoreOrder
from asynckv.connectors.store_shapes import SHAPE_KEY, StoredShape, namespace_of
from asynckv.connectors.transfers import Transfers, reason_of
from asynckv.connectors.whole_entries import forget_locals
from asynckv.errors import ConfigError, EntryAborted
from asynckv.observability.lines import as_line
from asynckv.tensors.cuda import Event
from asynckv.tensors.device_tensors import gpu_of
from asynckv.tensors.devices import Device
from asynckv.tensors.stagings import Stagings

__all__ = ("StoreWorker", "StoreWorkerStatistics")

_BLOCKS_AT_ONCE: Final = 16
_LANDED_BLOCKS: Final = 2 * _BLOCKS_AT_ONCE
"""So many land in memory of a GPU: of those that are scattered it is free later.

What finds no room in it has memory of torch's own there: at most as much as comes at
once, which is half of what there is room for, or one block.
"""

_STAGED_BLOCKS: Final = 64
_STAGED_BYTES: Final = 256 * 2**20
_WAIT_S: Final = 0.2
_MOST_CUT: Final = 4096


class _Save(NamedTuple):
    """A block that is to be stored."""

    order: StoreOrder
    offset: int
    key: str

    @property
    def number(self) -> int:
        """Which of its prompt's blocks it is."""
        return self.order.first_block + self.offset


logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class StoreWorkerStatistics:
    """One rank's transfers.

    ``unsaved_blocks`` were not saved, as the store failed, or as it is slow, or for a
    gap before them: the latter two are ``skipped_blocks``.
    """

    loading: int
    saving: int
    loaded_blocks: int
    saved_blocks: int
    skipped_blocks: int
    unsaved_blocks: int
    loaded_bytes: int
    saved_bytes: int
    lives: LifeCounters


class StoreWorker(CacheWorker):
    """Loads and saves what :class:`~asynckv.connectors.StoreScheduler` decides.

    ``wait_for_save`` waits until blocks are copied, not until they are stored: that
    goes on beside the next steps. While 64 blocks, and 256 MiB, are on their way it
    waits for room: 0.2 s a step, and not at all for a store that has stored nothing
    since it was waited for in vain. What then has no room is skipped, and of the same
    prompt all that follows: nothing is stored behind a gap.
    """

    metadata_type = StoreMetadata

    def __init__(
        self,
        config: KVTransferConfig,
        engine: KVEngine,
        store: KVStoreBuffer | None = None,
        *,
        stagings: Stagings | None = None,
        device: Device | None = None,
    ) -> None:
        super().__init__(config, engine, stagings=stagings, device=device)
        self._namespace = namespace_of(engine)
        self._line = StoreLine(config, engine, store, str(engine.rank))
        self._transfers = Transfers()
        self._spool: Spool | None = None
        self._orders: StoreMetadata | None = None
        self._saves: collections.deque[_Save] = collections.deque()
        self._ends: dict[str, int] = {}  # of prompts that are not stored further
        self._staged = 0
        self._has_ended = asyncio.Event()
        self._is_stalled = False
        self._at_once = asyncio.Semaphore(_BLOCKS_AT_ONCE)
        self._landings = asyncio.Semaphore(_BLOCKS_AT_ONCE)
        self._loaded_blocks = self._saved_blocks = self._skipped_blocks = 0
        self._failed_blocks = 0
        self._is_told = False

    async def start(self) -> None:
        """Nothing to open: the store is dialled when it is needed."""
        self._check_loop()

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        self._check_loop()
        if not isinstance(metadata, StoreMetadata):
            raise TypeError(f"{type(metadata).__name__} is another connector's")
        self._orders = metadata
        self._saves = collections.deque()
        for order in metadata.saves:
            if order.first_block <= self._ends.get(order.request_id, -1):
                del self._ends[order.request_id]  # it is begun again before its gap
            for index, key in enumerate(self._keys_of(order)):
                self._saves.append(_Save(order, index, key))

    def clear_connector_metadata(self) -> None:
        self._check_loop()
        self._orders = None
        self._saves = collections.deque()

    async def start_load_kv(self, context: object = None, **kwargs: object) -> None:
        self._check_loop()
        orders, self._orders = self._orders or StoreMetadata(), None
        for order in orders.loads:
            try:
                self._begin_load(order)
            except Exception as exc:
                # The loads after it are not less wanted.
                logger.exception("no load of %s began", as_line(order.request_id))
                blocks = {block for group in order.block_ids for block in group}
                self._transfers.refuse(order.request_id, "recv", blocks, reason_of(exc))
        for request_id in orders.aborts:
            self._transfers.cancel(request_id, "recv")

    async def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads happen between steps: there is nothing to wait for."""
        self._check_loop()

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor | None = None,
        attn_metadata: object = None,
        **kwargs: object,
    ) -> None:
        """A block is saved whole, with all its layers: in :meth:`wait_for_save`."""
        self._check_loop()

    async def wait_for_save(self) -> None:
        await self.begin_to_wait()

    def begin_to_wait(self) -> Coroutine[Any, Any, None]:
        self._check_loop()
        return self._wait_for_saves(self._saves, self._now() if self._saves else None)

    async def _wait_for_saves(
        self, saves: collections.deque[_Save], mark: Event | None
    ) -> None:
        until_s = asyncio.get_running_loop().time() + _WAIT_S
        while saves:
            save = saves[0]
            if save.order.request_id in self._ends or not await self._has_room(until_s):
                self._end(save)
                self._skipped_blocks += 1
            else:
                spool = self._spooled()
                value = await spool.gather(save.order.block_ids, save.offset, mark)
                put = functools.partial(self._put, save, value)
                self._transfers.begin_untold(put, f"put {save.key}")
                self._staged += 1
            saves.popleft()  # not before: a cancelled call has not saved it

    def get_finished(
        self, finished_req_ids: frozenset[str] = frozenset()
    ) -> KVTransferResults:
        self._check_loop()
        return self._transfers.results()

    def call_when_finished(self, callback: Callable[[], None]) -> None:
        self._check_loop_if_bound()
        self._transfers.call_when_ended(callback)

    async def flush(self) -> None:
        """Wait until everything that was saved is stored, or could not be.

        A cancelled call leaves no trace.
        """
        self._check_loop()
        await self._transfers.wait_others()

    def statistics(self) -> StoreWorkerStatistics:
        transfers = self._transfers
        block_nbytes = 0 if self._spool is None else self._spool.block_nbytes
        return StoreWorkerStatistics(
            loading=transfers.count("recv"),
            saving=transfers.others,
            loaded_blocks=self._loaded_blocks,
            saved_blocks=self._saved_blocks,
            skipped_blocks=self._skipped_blocks,
            unsaved_blocks=self._skipped_blocks + self._failed_blocks,
            loaded_bytes=self._loaded_blocks * block_nbytes,
            saved_bytes=self._saved_blocks * block_nbytes,
            lives=dataclasses.replace(transfers.counters),
        )

    async def aclose(self) -> None:
        self._check_loop()
        try:
            await self._transfers.aclose()
            with anyio.CancelScope(shield=True):
                await self._line.aclose()
        finally:  # also if the task is cancelled: nothing stays open
            self.abort()

    def abort(self) -> None:
        self._transfers.abort()
        self._line.abort()
        self._pool.close()
        if self._moves is not None:
            self._moves.close()

    def _register(self, caches: PagedCaches) -> None:
        landing, there = self._line.landing, str(caches.device)
        if landing is not None and landing != there:
            raise ConfigError(
                f"values land on {landing}, and the caches are on {there}",
                hint="caches that are registered again stay on their GPU",
            )
        super()._register(caches)
        self._spool = spool = Spool(self._registered())
        device = self._buffer_device()
        if device is not None and self.config.is_kv_consumer:
            wanted = _LANDED_BLOCKS * spool.block_nbytes
            nbytes = min(wanted, self.config.max_bytes)
            self._landings = asyncio.Semaphore(_BLOCKS_AT_ONCE * nbytes // wanted or 1)
            self._line.land_on(device, nbytes)

    def _now(self) -> Event | None:
        """Return where the engine's stream is."""
        return None if self._moves is None else self._moves.now()

    def _spooled(self) -> Spool:
        if self._spool is None:
            raise RuntimeError("register_kv_caches() comes first")
        return self._spool

    async def _has_room(self, until_s: float) -> bool:
        """Whether one more block may be on its way; wait for that, but not for long."""
        most = max(_STAGED_BLOCKS, _STAGED_BYTES // self._spooled().block_nbytes)
        if self._staged < most:
            return True
        if self._is_stalled:
            return False
        try:
            async with asyncio.timeout_at(until_s):
                while self._staged >= most:
                    self._has_ended.clear()
                    await self._has_ended.wait()
        except TimeoutError:
            self._is_stalled = True
            return False
        return True

    def _end(self, save: _Save) -> None:
        """The prompt is stored as far as here, at most."""
        request_id = save.order.request_id
        end = self._ends.pop(request_id, save.number)
        self._ends[request_id] = min(end, save.number)
        if len(self._ends) > _MOST_CUT:
            del self._ends[next(iter(self._ends))]

    def _begin_load(self, order: StoreOrder) -> None:
        spool, mark = self._spooled(), self._now()
        self._transfers.begin(
            order.request_id,
            "recv",
            lambda: self._load(order, spool, mark),
            {block for group in order.block_ids for block in group},
        )

    def _keys_of(self, order: StoreOrder) -> list[str]:
        return rank_block_keys(order.block_keys, self._namespace, self.engine.rank)

    async def _load(
        self, order: StoreOrder, spool: Spool, mark: Event | None = None
    ) -> None:
        keys = self._keys_of(order)
        async with asyncio.timeout(self.options.load_timeout_s):
            store = await self._line.store()
            async with store.pin(keys) as found:
                if not all(found):
                    raise EntryAborted(
                        f"{found.count(False)} of {len(keys)} blocks are not stored "
                        "any more",
                        reason="evicted",
                    )
                try:
                    async with asyncio.TaskGroup() as group:
                        for index, key in enumerate(keys):
                            scatter = functools.partial(
                                spool.scatter,
                                block_ids=order.block_ids,
                                index=index,
                                mark=mark,
                            )
                            group.create_task(self._load_block(store, key, scatter))
                except ExceptionGroup as failed:
                    raise failed.exceptions[0] from None

    async def _load_block(
        self,
        store: KVStoreBuffer,
        key: str,
        scatter: Callable[[torch.Tensor], Awaitable[None]],
    ) -> None:
        async with self._landings, self._at_once:
            value = await store.get(key)
            if value is None:
                raise EntryAborted("a block is not stored any more", reason="deleted")
            try:
                await scatter(value)
            except BaseException as exc:
                if gpu_of(value) is not None:
                    forget_locals(exc)  # who keeps it keeps no memory of a GPU
                raise
            finally:
                del value
            self._loaded_blocks += 1

    async def _put(self, save: _Save, value: torch.Tensor) -> None:
        is_stored = False
        try:
            async with self._at_once:
                store = await self._line.store()  # a GPU takes its time to be opened
                async with asyncio.timeout(self.options.save_timeout_s):
                    if not self._is_told:
                        shape = StoredShape.of(self.engine)
                        await store.put(SHAPE_KEY, shape.tensor())
                        self._is_told = True
                    await store.put(save.key, value)
            is_stored = True
            self._is_stalled = False
        finally:
            self._saved_blocks += is_stored
            self._failed_blocks += not is_stored
            if not is_stored:
                self._end(save)
            self._staged -= 1
            self._has_ended.set()
