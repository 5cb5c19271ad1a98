"""One prompt's KV on its way out of the blocks of one rank, layer by layer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

import msgspec
import torch

from asynckv.abc import KVLookupBuffer
from asynckv.connectors.caches import PagedCaches
from asynckv.connectors.headers import HEADER, EntryHeader
from asynckv.connectors.p2p_orders import SaveOrder
from asynckv.types import TensorSpec

__all__ = ("P2PSave", "Target", "tell_failure")

_REASON_LENGTH: Final = 300

Target: TypeAlias = "tuple[Callable[[], Awaitable[KVLookupBuffer]], str, int]"
"""Where an entry goes, once it is dialled, its id there, and how many read it."""


class P2PSave:
    """Puts each layer into one entry or more, as soon as it is computed."""

    def __init__(
        self,
        caches: PagedCaches,
        order: SaveOrder,
        header: EntryHeader,
        ttl_s: float,
    ) -> None:
        self.order = order
        self.nbytes = 0
        self._caches = caches
        self._header = header
        self._ttl_s = ttl_s
        self._offered: list[str] = []
        self._queues: list[asyncio.Queue[str]] = []

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
            await writer.put(HEADER, header)
            for _ in self._caches.layers:
                layer = await queue.get()
                blocks = self._caches.blocks(layer, order.block_ids)
                for name, memory in blocks.items():
                    await writer.put(name, memory)
                    self.nbytes += memory.nbytes


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
