"""How a load selects an entry: as it lands, where it lies on this GPU; or whole."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import torch

from asynckv.abc import KVEntry, KVLookupBuffer, SelectStream
from asynckv.buffers.local.writer import LocalViews
from asynckv.buffers.lookup import LookupBuffer
from asynckv.buffers.remote.lookup import RemoteLookupBuffer
from asynckv.shielding import clear_all_frames
from asynckv.tensors.blocks import KVBlocks
from asynckv.tensors.views import spec_of
from asynckv.transfers.layout import flatten

__all__ = ("WholeEntry", "are_views", "open_entry")


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
