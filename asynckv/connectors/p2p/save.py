"""One prompt's KV on its way out of the blocks of one rank, layer by layer.

A layer leaves its blocks by one of three paths: they are lent to whoever sends them; or
it is gathered in host memory, once for all targets; or in memory of its GPU, for each
target that something leads to from there. What has not left when the engine wants its
blocks comes to host memory, whatever its path was.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
from collections.abc import Awaitable, Callable, Iterable, Sequence

import torch

from asynckv.abc import InsertWriter
from asynckv.connectors.caches import BlockMoves, StagedCopy, Staging
from asynckv.connectors.engine import HEADER, EntryHeader
from asynckv.connectors.p2p.entries import Target
from asynckv.connectors.requests import SaveRequest
from asynckv.devices.cuda import Event
from asynckv.tensors.blocks import KVBlocks
from asynckv.transfers.routes import StagingWriter
from asynckv.transfers.source import StagedTensor, release_staged
from asynckv.types import TensorSpec
from asynckv.waits.waiting import PlainTaskGroup, clear_all_frames

__all__ = ("HostCopies", "P2PSave", "SavePath")


class SavePath(enum.Enum):
    """How layers leave their blocks, as long as nobody wants these."""

    LEND = "lend"
    """The blocks themselves are put. Those of a GPU only where the target has them."""
    HOST = "host"
    """Each layer is gathered in host memory as soon as it is computed."""
    GPU = "gpu"
    """Each is gathered in memory of its GPU, where a target has room for it there; for
    the other targets in host memory. There may be so little that it waits."""


class HostCopies:
    """Copies layers to ``staging``, in the order in which they are asked for.

    ``came`` is called with each that is there, or that nobody needs any more. Where
    there is no room it waits for other layers to be dropped.
    """

    def __init__(
        self,
        moves: BlockMoves,
        staging: Staging,
        blocks_of: Callable[[str], dict[str, KVBlocks]],
        came: Callable[[str], None],
    ) -> None:
        self.waits_for_room = False
        self.may_wait_for_room = True
        self._moves, self._staging = moves, staging
        self._blocks_of, self._on_came = blocks_of, came
        self._asks: asyncio.Queue[tuple[list[str], Event | None]] = asyncio.Queue()
        self._came: dict[str, asyncio.Event] = {}
        self._copies: dict[str, StagedCopy] = {}
        self._dropped: set[str] = set()

    def ask(self, layers: Iterable[str], mark: Event | None) -> None:
        """Bring these as they are at ``mark``: all of them, once there is room for all.

        Never waits. Again is nothing.
        """
        new = [layer for layer in layers if layer not in self._came]
        if new:
            self._came |= {layer: asyncio.Event() for layer in new}
            self._asks.put_nowait((new, mark))

    def is_asked(self, layer: str) -> bool:
        """Whether it was asked for."""
        return layer in self._came

    def is_there(self, layer: str) -> bool:
        """Whether its blocks are not read any more for that."""
        return layer in self._came and self._came[layer].is_set()

    async def copy_of(self, layer: str) -> StagedCopy:
        """Return a layer that was asked for, once it is there. Cancelled: no trace.

        :raises KeyError: it was not asked for, or was dropped
        """
        await self._came[layer].wait()
        return self._copies[layer]

    async def run(self) -> None:
        """Bring what is asked for, until it is cancelled.

        When it ends, in whatever way, no block is read any more.

        :raises TimeoutError: there is no room, and it may not wait for that any more
        :raises GPUFailed: CUDA failed
        """
        while True:
            await self._bring(*await self._asks.get())

    def drop(self, layer: str | None = None) -> None:
        """Forget a layer, or all: nobody reads them. Never waits; again is nothing.

        A layer that was not brought yet is not brought any more.
        """
        if layer is not None:
            self._dropped.add(layer)
            if self.waits_for_room:
                self._staging.release(0)  # it may be the one that there is no room for
        for name in [one for one in self._copies if layer in (None, one)]:
            self._copies.pop(name).drop(name)

    async def _bring(self, layers: list[str], mark: Event | None) -> None:
        copy = None
        while copy is None and (left := set(layers) - self._dropped):
            blocks = {one: self._blocks_of(one) for one in layers if one in left}
            copy = await self._staging.copy(blocks, self._moves, mark)
            if copy is None:
                await self._more_room()
        for layer in layers:
            if copy is not None:
                self._copies[layer] = copy
            if layer in self._dropped:
                self.drop(layer)
            self._came[layer].set()
            self._on_came(layer)

    async def _more_room(self) -> None:
        if not self.may_wait_for_room:
            raise TimeoutError("no room in host memory, and no time to wait")
        self.waits_for_room = True
        await self._staging.more_room.wait()
        self.waits_for_room = False


@dataclasses.dataclass(eq=False, slots=True)
class _Leaving:
    """One layer on its way to one target: what of it is not put yet, by name."""

    layer: str
    blocks: dict[str, KVBlocks]
    staged: list[StagedTensor] = dataclasses.field(default_factory=list)
    """Its copies on the GPU, if they leave from there."""


class P2PSave:
    """Puts each layer into one entry or more, as soon as it is computed.

    The blocks are read until :attr:`released` is set, by each target's own task, or by
    the one that brings layers to ``staging``; what is there goes on from its copy.
    ``is_local``: the entry is in a buffer of this process.
    """

    def __init__(
        self,
        moves: BlockMoves,
        request: SaveRequest,
        header: EntryHeader,
        ttl_s: float,
        staging: Staging,
        *,
        path: SavePath = SavePath.LEND,
        is_local: bool = False,
    ) -> None:
        self.request = request
        self.nbytes = 0
        """Of what was put."""
        self.released = asyncio.Event()
        self.must_release = False
        self.is_wanted = True
        self._moves, self._header, self._ttl_s = moves, header, ttl_s
        self._path, self._is_local = path, is_local
        self._host = HostCopies(moves, staging, self._blocks, self._on_came)
        self._marks: dict[str, Event | None] = {}
        self._offers: list[asyncio.Queue[str]] = []
        self._needed = dict.fromkeys(moves.caches.layers, 1)
        """How many targets need a layer's blocks, or its copy in host memory."""
        self._reads: dict[asyncio.Timeout, str] = {}
        self._not_admitted = 1
        self._waiting_for_gpu = 0

    @property
    def is_copying(self) -> bool:
        """Whether it waits for nobody any more, but for memory of this process."""
        left = [layer for layer, count in self._needed.items() if count]
        is_brought = not self._host.waits_for_room and all(
            map(self._host.is_asked, left)
        )
        if self._path is not SavePath.LEND:
            return is_brought or not (self._not_admitted or self._waits_for_room)
        if self._is_local and not self._not_admitted:
            return True
        # Who reads what is there all the same is a peer, and may not let go of it.
        return is_brought and any(
            self._host.is_asked(one) and not self._host.is_there(one)
            for one in self._needed
        )

    def lacks_room(self) -> bool:
        """Whether it waits for room in this process."""
        return self._is_local and (self._not_admitted > 0 or self._waits_for_room)

    def offer(self, layer: str, mark: Event | None = None) -> None:
        """The layer is computed at ``mark``: copy it soon. Never waits.

        Again is nothing.
        """
        if layer not in self._needed or layer in self._marks:
            return
        self._marks[layer] = mark
        if self._path is SavePath.HOST:
            self._host.ask((layer,), mark)
        for offers in self._offers:
            offers.put_nowait(layer)

    def offer_rest(self, mark: Event | None = None) -> None:
        """All layers are computed at ``mark``."""
        for layer in self._needed:
            self.offer(layer, mark)

    async def run(
        self,
        targets: Sequence[Target],
        *,
        prepare: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Save it all. No target is looked for before ``prepare`` has returned.

        When it ends, in whatever way, the blocks are no longer read; then an entry
        that is not whole is no entry.
        """
        self._not_admitted = len(targets)
        self._needed = dict.fromkeys(self._needed, len(targets))
        if not targets:
            return
        async with PlainTaskGroup() as group:
            # From the first: a step may want the blocks whatever is waited for.
            copying = group.create_task(self._host.run())
            if prepare is not None:
                await prepare()
            writes = [group.create_task(self._write(target)) for target in targets]
            await asyncio.wait(writes)
            copying.cancel()  # for nobody

    def move_to_host(self) -> None:
        """Bring to host memory what has not left. All was offered. Never waits.

        Again is nothing.
        """
        left = [layer for layer in self._marks if self._needed[layer]]
        if self._path is SavePath.LEND:
            # Nothing leaves meanwhile: half of it would only take room of other saves.
            # Until there is a copy, what is lent may be put in time.
            if left:
                self._host.ask(left, self._marks[left[-1]])
            return
        for layer in left:
            self._host.ask((layer,), self._marks[layer])
        for layer in filter(self._host.is_asked, self._needed):
            self._end_reads(layer)

    def stop_waiting(self) -> None:
        """No step waits any longer for room. All was offered. Never waits."""
        if self._path is not SavePath.LEND:  # which leaves, or fails, by itself
            self._host.may_wait_for_room = False
            self.move_to_host()

    def end(self) -> None:
        """It has ended, in whatever way. Never waits."""
        self.released.set()
        self._host.drop()

    @property
    def _waits_for_room(self) -> bool:
        """Whether copies wait for what has to leave before."""
        return self._host.waits_for_room or self._waiting_for_gpu > 0

    def _blocks(self, layer: str) -> dict[str, KVBlocks]:
        return self._moves.caches.blocks(layer, self.request.block_ids)

    def _recheck(self) -> None:
        """See whether the blocks are still read, or will be."""
        if not self._reads and not any(
            not self._host.is_there(layer) and (count or self._host.is_asked(layer))
            for layer, count in self._needed.items()
        ):
            self.released.set()

    def _on_came(self, layer: str) -> None:
        self._end_reads(layer)  # who has not put it by now is served by this copy
        self._recheck()

    def _end_reads(self, layer: str) -> None:
        for read, what in self._reads.items():
            if what == layer and not read.expired():
                read.reschedule(asyncio.get_running_loop().time())

    async def _write(self, target: Target) -> None:
        find, entry_id, deliveries = target
        request, header = self.request, self._header.tensor()
        offers: asyncio.Queue[str] = asyncio.Queue()
        for layer in self._marks:
            offers.put_nowait(layer)
        self._offers.append(offers)
        buffer = await find()
        async with buffer.open_insert(
            torch.tensor(request.token_ids, dtype=torch.int64),
            None,
            {
                HEADER: TensorSpec(tuple(header.shape), "uint8"),
                **self._moves.caches.specs(request.block_ids),
            },
            entry_id=entry_id,
            ttl_s=self._ttl_s,
            deliveries=deliveries,
        ) as writer:
            await writer.put(HEADER, header)
            self._not_admitted -= 1  # from here on it copies, whatever a peer does
            await self._put_all(writer, offers)

    async def _put_all(self, writer: InsertWriter, offers: asyncio.Queue[str]) -> None:
        """Put every layer, in the order of ``offers``: the next ones leave their blocks
        while one is on its way.

        When it ends, in whatever way, it reads no block, and has no memory of the GPU
        but what somebody is at.
        """
        ahead: asyncio.Queue[_Leaving] = asyncio.Queue()
        try:
            async with PlainTaskGroup() as group:
                group.create_task(self._read_all(writer, offers, ahead))
                for _ in self._needed:
                    await self._put(writer, await ahead.get())
        finally:
            while not ahead.empty():
                release_staged(ahead.get_nowait().staged)

    async def _read_all(
        self,
        writer: InsertWriter,
        offers: asyncio.Queue[str],
        ahead: asyncio.Queue[_Leaving],
    ) -> None:
        for _ in self._needed:
            layer = await offers.get()
            leaving = _Leaving(layer, self._blocks(layer))
            if await self._read(writer, leaving):
                self._done_with(layer)
            else:
                self._host.ask((layer,), self._marks[layer])
                await self._host.copy_of(layer)
            ahead.put_nowait(leaving)

    async def _read(self, writer: InsertWriter, leaving: _Leaving) -> bool:
        """Let a layer leave its blocks by its path; ``False``: it comes to the host."""
        layer = leaving.layer
        is_lent = self._path is SavePath.LEND and not self._host.is_there(layer)
        is_gathered = self._path is SavePath.GPU and not self._host.is_asked(layer)
        if not (is_lent or (is_gathered and isinstance(writer, StagingWriter))):
            return False
        try:
            # It is ended by who brings the layer to the host, or wants that.
            async with asyncio.timeout(None) as read:
                self._reads[read] = layer
                try:
                    await self._moves.reached(self._marks[layer])
                    if isinstance(writer, StagingWriter) and is_gathered:
                        return await self._gather(writer, leaving)
                    return await self._lend(writer, leaving)
                finally:
                    del self._reads[read]
                    self._recheck()
        except TimeoutError:
            if not read.expired():
                raise
            return False

    async def _lend(self, writer: InsertWriter, leaving: _Leaving) -> bool:
        for name in list(leaving.blocks):
            await writer.put(name, leaving.blocks[name])
            self.nbytes += leaving.blocks.pop(name).nbytes
        return True

    async def _gather(self, writer: StagingWriter, leaving: _Leaving) -> bool:
        """Gather a layer, which is computed, on its GPU; ``False``: not from there."""
        blocks = list(leaving.blocks.values())
        self._waiting_for_gpu += 1
        try:
            staged = await writer.room([one.spec for one in blocks])
        finally:
            self._waiting_for_gpu -= 1
        if staged is None:
            return False
        try:
            await self._moves.gather_there(blocks, [one.place() for one in staged])
        except BaseException as exc:
            clear_all_frames(exc)  # they keep the memory
            release_staged(staged)
            raise
        leaving.staged = staged
        return True

    async def _put(self, writer: InsertWriter, leaving: _Leaving) -> None:
        """Put what is left of a layer: its copies."""
        if leaving.staged and isinstance(writer, StagingWriter):
            try:
                for name, one in zip(leaving.blocks, leaving.staged, strict=True):
                    await writer.put_staged(name, one)
                    one.release()
                    self.nbytes += one.nbytes
            finally:
                release_staged(leaving.staged)
        elif leaving.blocks:
            copy = await self._host.copy_of(leaving.layer)
            for name in leaving.blocks:
                tensor = copy.tensor(leaving.layer, name)
                await writer.put(name, tensor)
                self.nbytes += tensor.nbytes
            self._done_with(leaving.layer)

    def _done_with(self, layer: str) -> None:
        """One target more needs neither its blocks nor a copy in host memory."""
        self._needed[layer] -= 1
        if not self._needed[layer]:
            self._host.drop(layer)
        self._recheck()
