"""One request's KV on its way into the blocks of one rank.

An entry is selected as it lands, where it lies on this GPU; or whole.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeAlias

import torch

from asynckv.abc import KVEntry, KVLookupBuffer, SelectStream
from asynckv.buffers.local.writer import LocalViews
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.lookup import RemoteLookupBuffer
from asynckv.connectors.assembly import Assembly, Scratch
from asynckv.connectors.caches import BlockMoves
from asynckv.connectors.connections import identity_of
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.keys import HEADER, EntryHeader, NotSaved, prompt_digest
from asynckv.connectors.requests import LoadOrder
from asynckv.errors import IncompatiblePeer
from asynckv.observability.lines import as_line
from asynckv.parallel.plans import RankRead
from asynckv.shielding import clear_all_frames
from asynckv.tensors.blocks import KVBlocks
from asynckv.tensors.views import spec_of
from asynckv.transfers.layout import flatten

__all__ = (
    "P2PLoad",
    "Source",
    "WholeEntry",
    "are_views",
    "open_entry",
    "release",
)


@contextlib.asynccontextmanager
async def open_entry(
    buffer: KVLookupBuffer, entry_id: str
) -> AsyncIterator[SelectStream]:
    """Select an entry as ``open_drop_select`` does; nobody may keep its tensors.

    In this process's own memory of a GPU they are views, as they land. In a peer's
    memory of this GPU it is waited for until it is whole, and they are views too: what
    streams there is copied.
    """
    async with _opened(buffer, entry_id) as stream:
        try:
            yield stream
        except BaseException as exc:
            if are_views(stream):
                clear_all_frames(exc)  # a view keeps the peer's memory in use
            raise


def are_views(stream: SelectStream) -> bool:
    """Are the tensors of a stream that was opened here views of a GPU's memory?"""
    return isinstance(stream, WholeEntry | LocalViews)


def _opened(
    buffer: KVLookupBuffer, entry_id: str
) -> contextlib.AbstractAsyncContextManager[SelectStream]:
    if isinstance(buffer, RemoteLookupBuffer) and buffer.shows_gpu_memory:
        return _whole(buffer, entry_id)
    if isinstance(buffer, LookupBuffer) and buffer.is_on_gpu:
        return buffer.open_views(entry_id)
    return buffer.open_drop_select(entry_id=entry_id)


@contextlib.asynccontextmanager
async def _whole(buffer: KVLookupBuffer, entry_id: str) -> AsyncIterator[SelectStream]:
    async with buffer.drop_select(entry_id=entry_id) as entry:
        whole = WholeEntry(entry)
        del entry  # its views are to end with this
        try:
            yield whole
        finally:
            whole.close()


class WholeEntry(SelectStream):
    """An entry that is here, as if its tensors landed one after the other."""

    def __init__(self, entry: KVEntry) -> None:
        self.entry_id = entry.entry_id
        self.attempt = entry.attempt
        self.matched_tokens = entry.matched_tokens
        self.input_tokens = entry.input_tokens
        self.roi = entry.roi
        named = flatten(entry.key, entry.value, entry.hidden, entry.extras)
        self._tensors = {
            name: tensor
            for name, tensor in named.items()
            if not isinstance(tensor, KVBlocks)  # which no entry holds
        }
        self.specs = {name: spec_of(tensor) for name, tensor in self._tensors.items()}
        self._left = list(self._tensors)

    async def __anext__(self) -> tuple[str, torch.Tensor]:
        if not self._left:
            raise StopAsyncIteration
        name = self._left.pop(0)
        return name, self._tensors[name]

    async def wait_for(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def close(self) -> None:
        """Nobody reads it any more. Never waits."""
        self._left.clear()
        self._tensors.clear()


Source: TypeAlias = "tuple[Callable[[], Awaitable[KVLookupBuffer]], str]"
"""Where an entry is, once it is dialled, and its id there."""


class P2PLoad:
    """Reads the entry of each source rank, and fills the blocks layer by layer.

    An entry that is of no use is acknowledged all the same: its producer shall not
    keep it. One of another prompt is given back: somebody else may be waiting for it.
    """

    def __init__(
        self,
        engine: KVEngine,
        moves: BlockMoves,
        order: LoadOrder,
        timeout_s: float,
    ) -> None:
        self.order = order
        self.nbytes = 0
        self.is_wanted = False
        """Whether another request here loads the same, should this one be aborted."""
        self._untaken: dict[int, Source] = {}
        self._unseen: set[int] = set()
        self._engine, self._caches = engine, moves.caches
        self._scratch = Scratch(moves, order, moves.now())
        self._timeout_s = timeout_s
        self._is_over = False
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._missing = dict.fromkeys(moves.caches.layers, 0)
        self.has_begun = False

    @property
    def untaken_sources(self) -> tuple[Source, ...]:
        """Where entries still are that were not acknowledged."""
        return tuple(self._untaken.values())

    def unseen_rank(self, identity: str) -> int | None:
        """Return the source rank of that name, if nothing of it has come yet.

        Where the request names no peer it may be any peer's rank of that number.
        """
        peer = self.order.peer or identity.rpartition("/")[0]
        for rank in self._unseen:
            if identity == identity_of(peer, rank):
                return rank
        return None

    async def run(
        self, reads: Mapping[int, RankRead | None], sources: Mapping[int, Source]
    ) -> None:
        """Load it all.

        When it ends, in whatever way, the blocks are no longer written to.

        :raises TimeoutError: nothing came for too long
        :raises NotSaved: the engine that computed it could not save it
        :raises IncompatiblePeer: what came was not this prompt's, or another model's,
            or not all of it
        """
        self._expect(reads, sources)
        self.has_begun = True
        try:
            async with asyncio.TaskGroup() as group:
                for rank, source in sources.items():
                    group.create_task(self._read(rank, source, reads[rank]))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            self.end()
        lacking = [layer for layer, count in self._missing.items() if count]
        if lacking:
            raise IncompatiblePeer(
                f"nothing came for {lacking[0]} and {len(lacking) - 1} more layers",
                field="layers",
            )

    def _expect(
        self, reads: Mapping[int, RankRead | None], sources: Mapping[int, Source]
    ) -> None:
        """Count what is to come: a layer is there when its last part is."""
        self._untaken, self._unseen = dict(sources), set(sources)
        for read in reads.values():
            for layer in self._engine.layers_of(read, self._caches.layers):
                self._missing[layer] += 1

    def end(self) -> None:
        """Nothing more will come, and nothing is copied: nobody waits. Never waits."""
        self._is_over = True
        self._scratch.drop()
        for future in self._waiting.values():
            _set_done(future)

    async def wait_for(self, layer: str) -> None:
        """Wait until the layer is there, or never will be.

        A cancelled call leaves no trace.
        """
        if self._is_over or (self.has_begun and not self._missing.get(layer)):
            return
        loop = asyncio.get_running_loop()
        future = self._waiting.setdefault(layer, loop.create_future())
        await asyncio.wait({future})

    async def _read(self, rank: int, source: Source, read: RankRead | None) -> None:
        find, entry_id = source
        refusal: IncompatiblePeer | NotSaved | None = None
        has_read = False
        try:
            async with asyncio.timeout(self._timeout_s) as silence:
                buffer = await find()
                async with open_entry(buffer, entry_id) as stream:
                    self._unseen.discard(rank)
                    if not _is_of(stream, self.order):
                        del self._untaken[rank]
                        raise _another_prompt(stream)
                    try:
                        await self._fill(stream, read, silence)
                    except (IncompatiblePeer, NotSaved) as exc:
                        refusal = exc
                        if are_views(stream):
                            clear_all_frames(exc)
                    has_read = True
        except (asyncio.CancelledError, TimeoutError) as exc:
            if has_read:  # the acknowledgement has left, only its answer has not come
                del self._untaken[rank]
            if isinstance(exc, TimeoutError):
                raise TimeoutError(self._silence_of(rank)) from exc
            raise
        del self._untaken[rank]
        if refusal is not None:
            raise refusal

    def _silence_of(self, rank: int) -> str:
        which = f"{as_line(self.order.transfer_id)} of {as_line(self.order.peer)}"
        never = ": it was never saved, or is no longer kept" * (rank in self._unseen)
        return f"nothing came of {which} for {self._timeout_s:g} s{never}"

    async def _fill(
        self, stream: SelectStream, read: RankRead | None, silence: asyncio.Timeout
    ) -> None:
        loop = asyncio.get_running_loop()
        assembly = await self._assembly(stream, read)
        async for name, tensor in stream:
            silence.reschedule(loop.time() + self._timeout_s)
            self.nbytes += tensor.nbytes
            layer = assembly.land(name, tensor)
            if layer is not None:
                placed = await assembly.place(layer)
                if self._missing[placed] == 1:
                    await self._scratch.leave(placed)
                self._landed(placed)

    async def _assembly(self, stream: SelectStream, read: RankRead | None) -> Assembly:
        order = self.order
        EntryHeader.check_spec(stream.specs.get(HEADER))
        told = await stream.wait_for(HEADER)
        (told,) = await self._scratch.moves.fetch([told])
        header = EntryHeader.of(told)
        header.check_saved()
        if header.salt != order.salt:
            raise IncompatiblePeer(
                "the entry's prompt has another cache salt, LoRA adapter or images",
                field="salt",
            )
        return Assembly(self._engine, self._scratch, header, read, stream.specs)

    def _landed(self, layer: str) -> None:
        self._missing[layer] -= 1
        if not self._missing[layer] and layer in self._waiting:
            _set_done(self._waiting.pop(layer))


async def release(source: Source, order: LoadOrder, timeout_s: float) -> None:
    """Acknowledge an entry unread, once it is there: nobody needs it.

    A cancelled call has done so or not.

    :raises TimeoutError: it did not come
    :raises IncompatiblePeer: it is of another prompt, and was given back
    """
    find, entry_id = source
    async with asyncio.timeout(timeout_s):
        buffer = await find()
        async with open_entry(buffer, entry_id) as stream:
            if not _is_of(stream, order):
                raise _another_prompt(stream)


def _is_of(stream: SelectStream, order: LoadOrder) -> bool:
    """Whether an entry's prompt begins as that of the request."""
    tokens, count = stream.input_tokens, order.num_tokens
    if tokens is None or len(tokens) < count:
        return False
    return prompt_digest(tokens[:count].tolist(), count) == order.digest


def _another_prompt(stream: SelectStream) -> IncompatiblePeer:
    count = 0 if stream.input_tokens is None else len(stream.input_tokens)
    return IncompatiblePeer(
        f"the entry of {count} tokens is of another prompt", field="tokens"
    )


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
