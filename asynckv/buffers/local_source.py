"""Tensors of this process, copied into an entry's memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch

from asynckv.buffers.admission import Landed
from asynckv.buffers.drafts import Draft
from asynckv.buffers.entries import StoredEntry
from asynckv.buffers.manifest import content_digest
from asynckv.errors import LeaseLost
from asynckv.protocol.values import TensorRecord
from asynckv.tensors.blocks import KVMemory
from asynckv.tensors.copying import CopyPool
from asynckv.tensors.runs import Runs

__all__ = ("LocalSource",)

_BATCH_NBYTES: Final = 8 * 2**20


class LocalSource:
    """The caller's own tensors: where an entry's bytes come from."""

    def __init__(self, tensors: Mapping[str, KVMemory], pool: CopyPool) -> None:
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
        targets = [
            part.region.place(part.spec)
            for part in entry.parts
            if part.region is not None
        ]
        if len(targets) != len(self._tensors):
            raise LeaseLost("the entry has left already")
        lent = entry.draft.lent
        in_place = {
            index
            for index, region in enumerate(lent)
            if region is not None and region is entry.parts[index].region
        }
        try:
            for some in _batches(self._tensors):
                await self._move(range(some.start, some.stop), targets, in_place)
                for index in range(some.start, some.stop):
                    landed(index, self._digests[index])
        finally:
            targets.clear()  # an error's traceback would keep the memory in use

    async def _move(
        self, some: range, targets: list[torch.Tensor | Runs], in_place: set[int]
    ) -> None:
        """Copy and digest some tensors, but copy none that is there already."""
        there = [index for index in some if index in in_place]
        others = [index for index in some if index not in in_place]
        sources = [self._tensors[index] for index in others]
        digests = await self._pool.copy(sources, [targets[index] for index in others])
        self._digests.update(zip(others, digests, strict=True))
        if there:
            digests = await self._pool.digest([self._tensors[i] for i in there])
            self._digests.update(zip(there, digests, strict=True))


def _batches(tensors: Sequence[KVMemory]) -> Iterator[slice]:
    """Tensors to copy at a time: who waits for them is sent the first ones early."""
    first, nbytes = 0, 0
    for end, tensor in enumerate(tensors, 1):
        nbytes += tensor.nbytes
        if nbytes >= _BATCH_NBYTES or end == len(tensors):
            yield slice(first, end)
            first, nbytes = end, 0
