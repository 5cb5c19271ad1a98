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
from asynckv.tensors.copying import CopyPool

__all__ = ("LocalSource",)

_BATCH_NBYTES: Final = 8 * 2**20


class LocalSource:
    """The caller's own tensors: where an entry's bytes come from."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], pool: CopyPool) -> None:
        self._tensors = list(tensors.values())
        self._pool = pool

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
            part.region.tensor(part.spec)
            for part in entry.parts
            if part.region is not None
        ]
        if len(targets) != len(self._tensors):
            raise LeaseLost("the entry has left already")
        try:
            for some in _batches(self._tensors):
                digests = await self._pool.copy(self._tensors[some], targets[some])
                for index, digest in enumerate(digests, some.start):
                    landed(index, digest)
        finally:
            targets.clear()  # an error's traceback would keep the memory in use


def _batches(tensors: Sequence[torch.Tensor]) -> Iterator[slice]:
    """Tensors to copy at a time: who waits for them is sent the first ones early."""
    first, nbytes = 0, 0
    for end, tensor in enumerate(tensors, 1):
        nbytes += tensor.nbytes
        if nbytes >= _BATCH_NBYTES or end == len(tensors):
            yield slice(first, end)
            first, nbytes = end, 0
