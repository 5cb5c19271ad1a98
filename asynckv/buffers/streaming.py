"""Layer by layer, locally: the writer of an entry and the reader of one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import torch

from asynckv.abc import InsertWriter, SelectStream
from asynckv.buffers.declared import Declared
from asynckv.buffers.entries.entries import Lease, StoredEntry
from asynckv.buffers.entries.ledger import Ledger
from asynckv.buffers.handover import tensors_of, view_of
from asynckv.buffers.holders import LocalHolder
from asynckv.buffers.queries import tensor_of
from asynckv.buffers.targets import match_targets
from asynckv.errors import EntryAborted
from asynckv.tensors.blocks import KVMemory
from asynckv.tensors.copying import CopyPool
from asynckv.types import TensorSpec

__all__ = ("LocalStream", "LocalViews", "LocalWriter")


class LocalWriter(InsertWriter):
    """Copies each tensor into the entry's memory."""

    def __init__(self, entry: StoredEntry, ledger: Ledger, pool: CopyPool) -> None:
        self.entry_id = entry.entry_id
        self._entry = entry
        self._ledger = ledger
        self._pool = pool
        self._declared = Declared(entry.draft.specs)
        self._is_closed = False
        self._indexes = {part.name: i for i, part in enumerate(entry.parts)}

    async def put(self, name: str, tensor: KVMemory) -> None:
        if self._is_closed:
            raise RuntimeError("the writer was left already")
        with self._declared.putting(name, tensor):
            await self._copy(self._indexes[name], tensor)

    def check_whole(self) -> None:
        """Refuse to commit what is not whole.

        :raises ValueError: a declared tensor was never put, or is still being put
        """
        self._declared.check_whole()

    def close(self) -> None:
        """No more puts."""
        self._is_closed = True

    async def _copy(self, index: int, tensor: KVMemory) -> None:
        entry, part = self._entry, self._entry.parts[index]
        if part.region is not None:
            (digest,) = await self._pool.copy([tensor], [part.region.place(part.spec)])
            self._ledger.landed(entry, index, digest)
        elif entry.left_by:
            raise EntryAborted(reason=entry.left_by)
        # else it left by being acknowledged early: nobody needs the rest


class LocalStream(SelectStream):
    """Copies each tensor out as it lands. The iteration and ``wait_for`` may mix."""

    def __init__(
        self,
        holder: LocalHolder,
        lease: Lease,
        pool: CopyPool,
        targets: Mapping[str, KVMemory],
    ) -> None:
        entry = lease.entry
        match_targets(entry.draft.specs, targets)
        self.entry_id = entry.entry_id
        self.attempt = lease.attempt
        self.matched_tokens = lease.matched_tokens
        self.input_tokens = tensor_of(entry.input_tokens)
        self.roi = tensor_of(entry.roi)
        self.specs: Mapping[str, TensorSpec] = dict(entry.draft.specs)
        self._holder = holder
        self._lease = lease
        self._pool = pool
        self._targets = targets
        self._tensors: dict[int, torch.Tensor] = {}
        self._copying = asyncio.Lock()
        self._next = 0
        self._is_closed = False

    async def __anext__(self) -> tuple[str, torch.Tensor]:
        entry = self._lease.entry
        await self._wait_for_landed(self._next)
        if self._next >= len(entry.parts):
            raise StopAsyncIteration
        index = entry.landed[self._next]
        tensor = await self._tensor(index)
        self._next += 1
        return entry.parts[index].name, tensor

    async def wait_for(self, name: str) -> torch.Tensor:
        parts = self._lease.entry.parts
        if name not in self.specs:
            raise KeyError(name)
        index = next(i for i, part in enumerate(parts) if part.name == name)
        while parts[index].digest is None:
            await self._wait_for_landed(len(self._lease.entry.landed))
        return await self._tensor(index)

    def close(self) -> None:
        """No more tensors; whoever waits for one learns it."""
        self._is_closed = True
        self._holder.wake()

    async def _wait_for_landed(self, count: int) -> None:
        if self._is_closed:
            raise RuntimeError("the stream was left already")
        await self._holder.landed(self._lease, count)

    async def _tensor(self, index: int) -> torch.Tensor:
        async with self._copying:
            if index not in self._tensors:
                self._holder.check_held(self._lease)
                part = self._lease.entry.parts[index]
                (tensor,) = await tensors_of([part], self._pool, self._targets)
                # Memory of an ended delivery may be somebody else's by now.
                self._holder.check_held(self._lease)
                self._tensors[index] = tensor
        return self._tensors[index]


class LocalViews(LocalStream):
    """Shows each tensor where it lies, once it has landed. It keeps none itself."""

    async def _tensor(self, index: int) -> torch.Tensor:
        self._holder.check_held(self._lease)
        return view_of(self._lease.entry.parts[index])
