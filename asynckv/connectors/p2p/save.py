"""One prompt's KV on its way out of the blocks of one rank, layer by layer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

import msgspec
import torch

from asynckv.abc import InsertWriter, KVLookupBuffer
from asynckv.connectors.caches import BlockMoves
from asynckv.connectors.keys import HEADER, EntryHeader
from asynckv.connectors.p2p.gpu_layers import GpuLayers, StagedCopy, Staging
from asynckv.connectors.requests import SaveOrder
from asynckv.devices.cuda import Event
from asynckv.tensors.blocks import KVBlocks
from asynckv.types import TensorSpec

__all__ = ("P2PSave", "Target", "report_failure", "withdraw")

_REASON_LENGTH: Final = 300

Target: TypeAlias = "tuple[Callable[[], Awaitable[KVLookupBuffer]], str, int]"
"""Where an entry goes, once it is dialled, its id there, and how many read it."""


class P2PSave:
    """Puts each layer into one entry or more, as soon as it is computed.

    The blocks are read until :attr:`quiet` is set; what was staged before goes on from
    its copy. Blocks on a GPU are put from copies alone: on that GPU, where something
    leads from there to a target (``may_lead_to_gpu``), else in ``staging``, as which
    each layer comes to the host once, however many targets there are. Where the target
    ``is_on_their_gpu`` they are put as blocks of the host are.
    """

    def __init__(
        self,
        moves: BlockMoves,
        order: SaveOrder,
        header: EntryHeader,
        ttl_s: float,
        *,
        staging: Staging | None = None,
        is_local: bool = False,
        is_on_their_gpu: bool = False,
        may_lead_to_gpu: bool = False,
    ) -> None:
        self.order = order
        self._nbytes = 0
        self.quiet = asyncio.Event()
        self.must_leave = False
        self.is_wanted = True
        self._moves = moves
        self._caches = caches = moves.caches
        self._header = header
        self._ttl_s = ttl_s
        self._is_local = is_local
        self._offered: list[str] = []
        self._queues: list[asyncio.Queue[str]] = []
        self._not_admitted = 1
        self._unread = dict.fromkeys(caches.layers, 1)
        self._readings: set[asyncio.Timeout] = set()
        self._copy: StagedCopy | None = None
        self._on_gpu: GpuLayers | None = None
        self._marks: dict[str, Event | None] = {}
        self._last_mark: Event | None = None
        if moves.is_on_gpu and not is_on_their_gpu:
            self._on_gpu = GpuLayers(
                *(moves, staging or Staging(0), self._blocks, self._look),
                by_host=not may_lead_to_gpu,
            )

    @property
    def nbytes(self) -> int:
        """Of what was put."""
        return self._nbytes if self._on_gpu is None else self._on_gpu.nbytes

    @property
    def is_copying(self) -> bool:
        """Whether it waits for nobody any more, but for memory of this process."""
        if self._on_gpu is None:
            return self._is_local and not self._not_admitted
        if self._on_gpu.wait_for_nobody:
            return True
        return not (self._not_admitted or self._on_gpu.wait_for_room)

    def lacks_room(self) -> bool:
        """Whether it waits for room in this process."""
        waits = self._on_gpu is not None and self._on_gpu.wait_for_room
        return self._is_local and (self._not_admitted > 0 or waits)

    def offer(self, layer: str, mark: Event | None = None) -> None:
        """The layer is computed at ``mark``: copy it soon. Never waits.

        Again is nothing.
        """
        if layer not in self._caches.layers or layer in self._offered:
            return
        self._offered.append(layer)
        self._marks[layer] = self._last_mark = mark
        if self._on_gpu is not None:
            self._on_gpu.offer(layer, mark)
        for queue in self._queues:
            queue.put_nowait(layer)

    def offer_rest(self, mark: Event | None = None) -> None:
        """All layers are computed at ``mark``."""
        for layer in self._caches.layers:
            self.offer(layer, mark)

    async def run(self, targets: Sequence[Target]) -> None:
        """Save it all.

        When it ends, in whatever way, the blocks are no longer read; then an entry
        that is not whole is no entry.
        """
        self._not_admitted = len(targets)
        self._unread = dict.fromkeys(self._caches.layers, len(targets))
        if self._on_gpu is not None:
            self._on_gpu.begin(len(targets))
        if not targets:
            return
        try:
            async with asyncio.TaskGroup() as group:
                if self._on_gpu is not None:
                    group.create_task(self._on_gpu.run())
                writes = [
                    group.create_task(self._write(target, self._new_queue()))
                    for target in targets
                ]
                await asyncio.wait(writes)
                if self._on_gpu is not None:
                    self._on_gpu.finish()
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def stage(self, staging: Staging) -> bool:
        """Copy what is not put yet, so that the save goes on from there.

        ``False``: there is no room for that. All layers must have been offered. It
        may be called again. A cancelled call leaves no trace, and reads no block.
        """
        if self._copy is not None or self.quiet.is_set():
            return True
        if self._on_gpu is not None:
            self._on_gpu.leave_gpu()
            return False  # it is being done, if there is room
        unread = [layer for layer, count in self._unread.items() if count]
        blocks = {layer: self._blocks(layer) for layer in unread}
        copy = await staging.copy(blocks, self._moves, self._last_mark)
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

    def hurry(self) -> None:
        """No step waits any longer for room in staging. Never waits."""
        if self._on_gpu is not None:
            self._on_gpu.hurry()

    def end(self) -> None:
        """It has ended, in whatever way. Never waits."""
        self.quiet.set()
        if self._copy is not None:
            self._copy.drop()
        if self._on_gpu is not None:
            self._on_gpu.drop()

    def _new_queue(self) -> asyncio.Queue[str]:
        queue: asyncio.Queue[str] = asyncio.Queue()
        for layer in self._offered:
            queue.put_nowait(layer)
        self._queues.append(queue)
        return queue

    def _blocks(self, layer: str) -> dict[str, KVBlocks]:
        return self._caches.blocks(layer, self.order.block_ids)

    def _look(self) -> None:
        """See whether the blocks are still read, or will be."""
        if self._on_gpu is not None:
            is_read = self._on_gpu.are_read
        else:
            is_copied = self._copy is not None and not self._readings
            is_read = not is_copied and any(self._unread.values())
        if not is_read:
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
            if self._on_gpu is None:
                self._not_admitted -= 1
            await writer.put(HEADER, header)
            if self._on_gpu is not None:
                self._not_admitted -= 1  # from here on it copies, whatever a peer does
                await self._on_gpu.put(writer, queue)
                return
            for _ in self._caches.layers:
                layer = await queue.get()
                for name, memory in self._blocks(layer).items():
                    await self._put(writer, layer, name, memory)
                    self._nbytes += memory.nbytes
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
                        await self._moves.reached(self._marks[layer])
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


async def report_failure(
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


async def withdraw(target: Target, timeout_s: float) -> None:
    """Remove an entry that nobody will ask for, if it is there.

    A cancelled call has done so or not.

    :raises TimeoutError: who holds it did not answer
    """
    find, entry_id, _ = target
    async with asyncio.timeout(timeout_s):
        buffer = await find()
        await buffer.withdraw(entry_id)
