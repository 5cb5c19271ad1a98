"""The layers of one save from blocks on a GPU: within it, or by way of the host.

What becomes of each is chosen where it leaves. Where something leads from this GPU to
the target's it is gathered in memory of this one, and goes from there; there may be so
little that layers wait for those before them. Else, and where no step waits for that,
it is gathered in host memory, in the order of offers and once for all targets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeAlias

from asynckv.abc import InsertWriter
from asynckv.connectors.caches import BlockMoves, StagedCopy, Staging
from asynckv.devices.cuda import Event
from asynckv.shielding import clear_all_frames
from asynckv.tensors.blocks import KVBlocks
from asynckv.transfers.routes import StagingWriter
from asynckv.transfers.source import StagedTensor, release_staged

__all__ = (
    "GpuLayers",
    "LayerGathering",
)


_Offer: TypeAlias = "tuple[str, Event | None]"


class LayerGathering:
    """Copies layers to ``staging`` one after the other, in the order of their offers.

    ``gathered`` is called with each that is there, or that nobody needs any more. Where
    there is no room it waits for other layers to be dropped.
    """

    def __init__(
        self,
        moves: BlockMoves,
        staging: Staging,
        blocks_of: Callable[[str], dict[str, KVBlocks]],
        gathered: Callable[[str], None],
    ) -> None:
        self.is_waiting_for_room = False
        self.may_wait_for_room = True
        self._moves, self._staging = moves, staging
        self._blocks_of, self._gathered = blocks_of, gathered
        self._offers: asyncio.Queue[_Offer | None] = asyncio.Queue()
        self._copies: dict[str, StagedCopy] = {}
        self._dropped: set[str] = set()
        self._came: dict[str, asyncio.Event] = {}

    def offer(self, layer: str, mark: Event | None) -> None:
        """The layer is computed at ``mark``: bring it soon. Never waits."""
        self._offers.put_nowait((layer, mark))

    def copy_of(self, layer: str) -> StagedCopy:
        """Return a layer that was gathered.

        :raises KeyError: it was not, or was dropped
        """
        return self._copies[layer]

    def came(self, layer: str) -> asyncio.Event:
        """Return what is set once a layer is there."""
        return self._came.setdefault(layer, asyncio.Event())

    def finish(self) -> None:
        """Nothing more will be offered. Never waits."""
        self._offers.put_nowait(None)

    async def run(self) -> None:
        """Bring what is offered, until nothing more will be.

        When it ends, in whatever way, no block is read any more.

        :raises TimeoutError: there is no room, and it may not wait for that any more
        :raises GPUFailed: CUDA failed
        """
        while (offer := await self._offers.get()) is not None:
            await self._bring(*offer)

    async def _bring(self, layer: str, mark: Event | None) -> None:
        blocks, copy = {layer: self._blocks_of(layer)}, None
        while copy is None and layer not in self._dropped:
            copy = await self._staging.copy(blocks, self._moves, mark)
            if copy is None:
                await self._more_room()
        if copy is not None:
            self._copies[layer] = copy
        if layer in self._dropped:
            self.drop(layer)
        self._gathered(layer)
        self.came(layer).set()

    async def _more_room(self) -> None:
        if not self.may_wait_for_room:
            raise TimeoutError("no room in host memory, and no time to wait")
        self.is_waiting_for_room = True
        await self._staging.more_room.wait()
        self.is_waiting_for_room = False

    def drop(self, layer: str | None = None) -> None:
        """Forget a layer, or all: nobody reads them. Never waits; again is nothing.

        A layer that was not brought yet is not brought any more.
        """
        if layer is not None:
            self._dropped.add(layer)
            if self.is_waiting_for_room:
                self._staging.release(0)  # it may be the one that there is no room for
        for name in [one for one in self._copies if layer in (None, one)]:
            self._copies.pop(name).drop()


_Taken: TypeAlias = "tuple[str, list[StagedTensor]]"
"""A layer, and its copies on the GPU; none of one that comes by way of the host."""


class GpuLayers:
    """What is still to be read of the blocks, and where it is copied to.

    ``changed`` is called when blocks may be read no more. With ``by_host`` nothing goes
    within the GPU: each layer is gathered as soon as it is offered.
    """

    def __init__(
        self,
        moves: BlockMoves,
        staging: Staging,
        blocks_of: Callable[[str], dict[str, KVBlocks]],
        changed: Callable[[], None],
        *,
        by_host: bool,
    ) -> None:
        self._moves, self._blocks_of, self._changed = moves, blocks_of, changed
        self.goes_by_host = by_host
        self.nbytes = 0
        """Of what was put."""
        self._gathering = LayerGathering(moves, staging, blocks_of, self._on_gathered)
        self._marks: dict[str, Event | None] = {}
        self._needed = dict.fromkeys(moves.caches.layers, 1)
        """How many targets have neither taken nor put a layer."""
        self._asked: set[str] = set()
        self._gathered: set[str] = set()
        self._takings: dict[asyncio.Timeout, str] = {}
        self._waiting_for_room = 0

    @property
    def are_read(self) -> bool:
        """Whether blocks are read, or will be."""
        return bool(self._takings) or any(
            layer not in self._gathered and (count or layer in self._asked)
            for layer, count in self._needed.items()
        )

    @property
    def wait_for_nobody(self) -> bool:
        """Whether blocks go on to be copied, were all targets to stand still."""
        if self._gathering.is_waiting_for_room:
            return False
        left = (layer for layer, count in self._needed.items() if count)
        return all(layer in self._asked for layer in left)

    @property
    def wait_for_room(self) -> bool:
        """Whether what leaves within the GPU waits for what left before."""
        return self._gathering.is_waiting_for_room or bool(self._waiting_for_room)

    def offer(self, layer: str, mark: Event | None) -> None:
        """The layer is computed at ``mark``. Never waits."""
        self._marks[layer] = mark
        if self.goes_by_host:
            self._ask(layer)

    def begin(self, targets: int) -> None:
        """There are so many targets."""
        self._needed = dict.fromkeys(self._needed, targets)

    async def run(self) -> None:
        """Gather in host memory what is asked for, until :meth:`finish`.

        When it ends, in whatever way, it reads no block.

        :raises TimeoutError: there is no room, and it may not wait for that any more
        :raises GPUFailed: CUDA failed
        """
        await self._gathering.run()

    async def put(self, writer: InsertWriter, offers: asyncio.Queue[str]) -> None:
        """Put every layer, in the order of ``offers``.

        The next ones are gathered while one is on its way. When it ends, in whatever
        way, it reads no block, and has no memory of the GPU but what somebody is at.

        :raises Exception: what ``writer`` raises
        :raises GPUFailed: CUDA failed
        """
        ahead: asyncio.Queue[_Taken] = asyncio.Queue()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._take_all(writer, offers, ahead))
                for _ in self._needed:
                    layer, staged = await ahead.get()
                    await self._put(writer, layer, staged)
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            while not ahead.empty():
                release_staged(ahead.get_nowait()[1])

    def finish(self) -> None:
        """All was put. Never waits."""
        self._gathering.finish()

    def move_to_host(self) -> None:
        """Gather in host memory what is not taken yet. All was offered. Never waits."""
        for layer in self._marks:  # in the order in which they are put
            if self._needed[layer]:
                self._ask(layer)
        for layer in self._asked:
            self._end_takings(layer)

    def stop_waiting(self) -> None:
        """No step waits any longer for room. All was offered. Never waits."""
        self._gathering.may_wait_for_room = False
        self.move_to_host()

    def drop(self) -> None:
        """It has ended, in whatever way. Never waits."""
        self._gathering.drop()

    def _ask(self, layer: str) -> None:
        if layer not in self._asked:
            self._asked.add(layer)
            self._gathering.offer(layer, self._marks[layer])

    def _on_gathered(self, layer: str) -> None:
        self._gathered.add(layer)
        self._end_takings(layer)  # who has no copy by now is served by this one
        self._changed()

    def _end_takings(self, layer: str) -> None:
        for taking, taken in self._takings.items():
            if taken == layer and not taking.expired():
                taking.reschedule(asyncio.get_running_loop().time())

    async def _take_all(
        self,
        writer: InsertWriter,
        offers: asyncio.Queue[str],
        ahead: asyncio.Queue[_Taken],
    ) -> None:
        for _ in self._needed:
            layer = await offers.get()
            staged = await self._take(writer, layer)
            if staged is None:
                self._ask(layer)
                await self._gathering.came(layer).wait()
            ahead.put_nowait((layer, staged or []))
            if staged is not None:
                self._done_with(layer)

    async def _take(
        self, writer: InsertWriter, layer: str
    ) -> list[StagedTensor] | None:
        """Gather a layer within the GPU, if it goes on from there."""
        if layer in self._asked or not isinstance(writer, StagingWriter):
            return None
        try:
            # It is ended when host memory was asked for, at once or once that is read.
            async with asyncio.timeout(None) as taking:
                self._takings[taking] = layer
                try:
                    return await self._gather(writer, layer)
                finally:
                    del self._takings[taking]
                    self._changed()
        except TimeoutError:
            if not taking.expired():
                raise
            return None

    async def _gather(
        self, writer: StagingWriter, layer: str
    ) -> list[StagedTensor] | None:
        blocks = list(self._blocks_of(layer).values())
        await self._moves.reached(self._marks[layer])  # no room is taken before
        self._waiting_for_room += 1
        try:
            staged = await writer.room([one.spec for one in blocks])
        finally:
            self._waiting_for_room -= 1
        if staged is None:
            return None
        try:
            await self._moves.gather_there(blocks, [one.place() for one in staged])
        except BaseException as exc:
            clear_all_frames(exc)  # they keep the memory
            release_staged(staged)
            raise
        return staged

    async def _put(
        self, writer: InsertWriter, layer: str, staged: Sequence[StagedTensor]
    ) -> None:
        names = self._blocks_of(layer)
        if staged and isinstance(writer, StagingWriter):
            try:
                for name, one in zip(names, staged, strict=True):
                    await writer.put_staged(name, one)
                    one.release()
                    self.nbytes += one.nbytes
            finally:
                release_staged(staged)
            return
        copy = self._gathering.copy_of(layer)
        for name in names:
            tensor = copy.tensor(layer, name)
            await writer.put(name, tensor)
            self.nbytes += tensor.nbytes
        self._done_with(layer)

    def _done_with(self, layer: str) -> None:
        """One target more needs neither its blocks nor a copy in host memory."""
        self._needed[layer] -= 1
        if not self._needed[layer]:
            self._gathering.drop(layer)
        self._changed()
