"""Tensors of this process, copied into an entry's memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch

from asynckv.buffers.entries.admission import Landed
from asynckv.buffers.entries.entries import Draft, StoredEntry
from asynckv.buffers.manifest import content_digest
from asynckv.errors import LeaseLost
from asynckv.protocol.values import TensorRecord
from asynckv.tensors.blocks import KVMemory
from asynckv.tensors.copying import CopyPool
from asynckv.tensors.cuda import DeviceMemory
from asynckv.tensors.on_gpu import KVOnGpu
from asynckv.tensors.runs import Runs

__all__ = ("LocalSource",)

_BATCH_NBYTES: Final = 8 * 2**20

_BATCH_TENSORS: Final = 16
"""Views of an arena's memory take their time to be made: 40 us, on the loop."""


class LocalSource:
    """The caller's own tensors: where an entry's bytes come from."""

    def __init__(
        self, tensors: Mapping[str, KVMemory | KVOnGpu], pool: CopyPool
    ) -> None:
        self._tensors = list(tensors.values())
        self._pool = pool
        self._digests: dict[int, bytes] = {}

    async def digest(self, draft: Draft) -> bytes:
        """Return what the entry's digest will be."""
        digests = await self._pool.digest(self._tensors)
        records = [
            TensorRecord(name, spec, digest)
            for (name, spec), digest in zip(draft.specs.items(), digests, strict=True)
        ]
        return content_digest(records, draft.input_tokens, draft.roi)

    async def fill(self, entry: StoredEntry, landed: Landed) -> None:
        regions = [part.region for part in entry.parts if part.region is not None]
        if len(regions) != len(self._tensors):
            raise LeaseLost("the entry has left already")
        lent = entry.draft.lent
        in_place = {
            index
            for index, region in enumerate(lent)
            if region is not None and region is entry.parts[index].region
        }
        for some in _batches(self._tensors):
            if len(regions) > _BATCH_TENSORS:
                await asyncio.sleep(0)
            targets = {
                index: regions[index].place(entry.parts[index].spec)
                for index in some
                if index not in in_place
            }
            try:
                await self._move(some, targets)
            finally:
                targets.clear()  # an error's traceback would keep the memory in use
            for index in some:
                landed(index, self._digests[index])

    async def _move(
        self, some: range, targets: dict[int, torch.Tensor | Runs | DeviceMemory]
    ) -> None:
        """Copy and digest some tensors; those without a target are there already."""
        there = [index for index in some if index not in targets]
        others = list(targets)
        sources = [self._tensors[index] for index in others]
        digests = await self._pool.copy(sources, list(targets.values()))
        self._digests.update(zip(others, digests, strict=True))
        if there:
            digests = await self._pool.digest([self._tensors[i] for i in there])
            self._digests.update(zip(there, digests, strict=True))


def _batches(tensors: Sequence[KVMemory | KVOnGpu]) -> Iterator[range]:
    """Tensors to copy at a time: who waits for them is sent the first ones early."""
    first, nbytes = 0, 0
    for end, tensor in enumerate(tensors, 1):
        nbytes += tensor.nbytes
        is_full = nbytes >= _BATCH_NBYTES or end - first == _BATCH_TENSORS
        if is_full or end == len(tensors):
            yield range(first, end)
            first, nbytes = end, 0
