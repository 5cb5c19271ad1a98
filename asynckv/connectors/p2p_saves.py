"""One prompt's KV on its way out of the blocks of one rank, layer by layer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

import msgspec
import torch

from asynckv.abc import InsertWriter, KVLookupBuffer
from asynckv.connectors.caches import PagedCaches
from asynckv.connectors.headers import HEADER, EntryHeader
from asynckv.connectors.p2p_orders import SaveOrder
from asynckv.connectors.staging import StagedCopy, Staging
from asynckv.tensors.blocks import KVBlocks
from asynckv.tensors.copying import CopyPool
from asynckv.types import TensorSpec

__all__ = ("P2PSave", "Target", "tell_failure")

_REASON_LENGTH: Final = 300

Target: TypeAlias = "tuple[Callable[[], Awaitable[KVLookupBuffer]], str, int]"
"""Where an entry goes, once it is dialled, its id there, and how many read it."""


class P2PSave:
    """Puts each layer into one entry or more, as soon as it is computed.

    The blocks are read until :attr:`quiet` is set; what was staged before goes on from
    its copy.
    """

    def __init__(
        self,
        caches: PagedCaches,
        order: SaveOrder,
        header: EntryHeader,
        ttl_s: float,
        *,
        is_local: bool = False,
    ) -> None:
        self.order = order
        self.nbytes = 0
        self.quiet = asyncio.Event()
        self.must_leave = False
        self._caches = caches
        self._header = header
        self._ttl_s = ttl_s
        self._is_local = is_local
        self._offered: list[str] = []
        self._queues: list[asyncio.Queue[str]] = []
        self._not_admitted = 1
        self._unread = dict.fromkeys(caches.layers, 1)
        self._readings: set[asyncio.Timeout] = set()
        self._copy: StagedCopy | None = None

    @property
    def is_copying(self) -> bool:
        """Whether it waits for nobody any more, but for memory of this process."""
        return self._is_local and not self._not_admitted

    def offer(self, layer: str) -> None:
        """The layer is computed: copy it soon. Never waits; again is nothing."""
        if layer in self._caches.layers and layer not in self._offered:
            self._offered.append(layer)
            for queue in self._queues:
                queue.put_nowait(layer)

    def offer_rest(self) -> None:
        """All layers are computed."""
        for layer in self._caches.layers:
            self.offer(layer)

    async def run(self, targets: Sequence[Target]) -> None:
        """Save it all.

        When it ends, in whatever way, the blocks are no longer read; then an entry
        that is not whole is no entry.
        """
        self._not_admitted = len(targets)
        self._unread = dict.fromkeys(self._caches.layers, len(targets))
        try:
            async with asyncio.TaskGroup() as group:
                for target in targets:
                    queue: asyncio.Queue[str] = asyncio.Queue()
                    for layer in self._offered:
                        queue.put_nowait(layer)
                    self._queues.append(queue)
                    group.create_task(self._write(target, queue))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def stage(self, staging: Staging, pool: CopyPool) -> bool:
        """Copy what is not put yet, so that the save goes on from there.

        ``False``: there is no room for that. All layers must have been offered. It
        may be called again. A cancelled call leaves no trace, and reads no block.
        """
        if self._copy is not None or self.quiet.is_set():
            return True
        unread = [layer for layer, count in self._unread.items() if count]
        blocks = {layer: self._blocks(layer) for layer in unread}
        copy = await staging.copy(blocks, pool)
        if copy is None:
            return False
        if self.quiet.is_set():
            copy.drop()
            return True
        self._copy = copy
        for layer in unread:
            if not self._unread[layer]:
                copy.drop(layer)
        for reading in self._readings:
            reading.reschedule(asyncio.get_running_loop().time())
        self._look()
        return True

    def end(self) -> None:
        """It has ended, in whatever way. Never waits."""
        self.quiet.set()
        if self._copy is not None:
            self._copy.drop()

    def _blocks(self, layer: str) -> dict[str, KVBlocks]:
        return self._caches.blocks(layer, self.order.block_ids)

    def _look(self) -> None:
        """See whether the blocks are still read, or will be."""
        is_copied = self._copy is not None and not self._readings
        if is_copied or not any(self._unread.values()):
            self.quiet.set()

    async def _write(self, target: Target, queue: asyncio.Queue[str]) -> None:
        find, entry_id, deliveries = target
        order, header = self.order, self._header.tensor()
        buffer = await find()
        async with buffer.open_insert(
            torch.tensor(order.token_ids, dtype=torch.int64),
            None,
            {
                HEADER: TensorSpec(tuple(header.shape), "uint8"),
                **self._caches.specs(order.block_ids),
            },
            entry_id=entry_id,
            ttl_s=self._ttl_s,
            deliveries=deliveries,
        ) as writer:
            self._not_admitted -= 1
            await writer.put(HEADER, header)
            for _ in self._caches.layers:
                layer = await queue.get()
                for name, memory in self._blocks(layer).items():
                    await self._put(writer, layer, name, memory)
                    self.nbytes += memory.nbytes
                self._layer_put(layer)

    async def _put(
        self, writer: InsertWriter, layer: str, name: str, blocks: KVBlocks
    ) -> None:
        """Put one tensor from where it lies; from its copy, once there is one."""
        if self._copy is None:
            try:
                # It is ended by `stage`: by then there is a copy.
                async with asyncio.timeout(None) as reading:
                    self._readings.add(reading)
                    try:
                        await writer.put(name, blocks)
                    finally:
                        self._readings.discard(reading)
                return
            except TimeoutError:
                if not reading.expired():
                    raise
            finally:
                self._look()
        copy = self._copy
        if copy is None:
            raise RuntimeError("a put was ended, and there is no copy")
        await writer.put(name, copy.tensor(layer, name))

    def _layer_put(self, layer: str) -> None:
        self._unread[layer] -= 1
        if not self._unread[layer] and self._copy is not None:
            self._copy.drop(layer)
        self._look()


async def tell_failure(
    target: Target,
    token_ids: Sequence[int],
    header: EntryHeader,
    reason: str,
    ttl_s: float,
) -> None:
    """Put an entry there that says why there is none, for who waits or will ask.

    A cancelled call has done so or not.

    :raises EntryConflict: there is one, for it was whole before the others failed
    :raises TimeoutError: there was no room in all the time that it would have stayed
    """
    find, entry_id, deliveries = target
    told = msgspec.structs.replace(
        header, layers=(), shape=None, failure=reason[:_REASON_LENGTH] or "it failed"
    )
    name = HEADER.removeprefix("extras.")
    async with asyncio.timeout(ttl_s):
        buffer = await find()
        await buffer.insert(
            torch.tensor(token_ids, dtype=torch.int64),
            *(None, None, None, None),
            extras={name: told.tensor()},
            entry_id=entry_id,
            ttl_s=ttl_s,
            deliveries=deliveries,
        )
