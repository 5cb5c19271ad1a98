"""Layer by layer, locally: the writer of an entry and the reader of one.

Tensors of this process are copied into an entry's memory, each of those that were
declared once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import torch

from asynckv.abc import InsertWriter, SelectStream
from asynckv.buffers.entries.admission import Landed
from asynckv.buffers.entries.entries import Draft, EntryState, Lease, StoredEntry
from asynckv.buffers.entries.ledger import Ledger
from asynckv.buffers.local.select import LocalSelect, tensors_of, view_of
from asynckv.devices.arena import place_of
from asynckv.devices.copying import CopyPool
from asynckv.devices.cuda import DeviceMemory
from asynckv.devices.tensors import KVOnGpu
from asynckv.errors import EntryAborted, LeaseLost
from asynckv.tensors.blocks import KVMemory, spec_in
from asynckv.tensors.runs import Runs
from asynckv.transfers.manifest import content_digest, names_in
from asynckv.transfers.targets import match_targets
from asynckv.transfers.tokens import tensor_of
from asynckv.types import TensorSpec

__all__ = (
    "Declared",
    "LocalSource",
    "LocalStream",
    "LocalViews",
    "LocalWriter",
    "spec_put",
)


class Declared:
    """What a writer has promised, and what it has kept of it."""

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        self._specs = specs
        self._begun: set[str] = set()
        self._put: set[str] = set()
        self.is_closed = False
        """No more puts: the writer was left."""

    @contextmanager
    def putting(self, name: str, spec: TensorSpec) -> Iterator[None]:
        """Note a put. One that fails has put nothing, and may be made again.

        :raises RuntimeError: the writer was left
        :raises ValueError: unknown name, put before, other shape or dtype
        """
        if self.is_closed:
            raise RuntimeError("the writer was left already")
        self._check(name, spec)
        self._begun.add(name)
        try:
            yield
        except BaseException:
            self._begun.discard(name)
            raise
        self._put.add(name)

    def check_whole(self) -> None:
        """Refuse to commit what is not whole.

        :raises ValueError: a tensor was never put, or is still being put
        """
        missing = [name for name in self._specs if name not in self._put]
        if missing:
            raise ValueError(
                f"{len(missing)} declared tensors were not put: "
                f"{', '.join(missing[:5])}; the entry is aborted "
                "(await writer.put(name, tensor) for each)"
            )

    def _check(self, name: str, found: TensorSpec) -> None:
        if name not in self._specs:
            declared = names_in(self._specs)
            raise ValueError(f"{name!r} was not declared; declared: {declared}")
        if name in self._begun:
            raise ValueError(f"{name!r} was put before")
        spec = self._specs[name]
        if found != spec:
            raise ValueError(
                f"{name!r} is {found.dtype} {found.shape}, declared was "
                f"{spec.dtype} {spec.shape}"
            )


def spec_put(name: str, tensor: KVMemory) -> TensorSpec:
    """Return what is put by that name.

    :raises TypeError: no tensor
    """
    if not isinstance(tensor, KVMemory):
        raise TypeError(f"{name!r} is a {type(tensor).__name__}, not a tensor")
    return spec_in(tensor)


class LocalWriter(InsertWriter):
    """Copies each tensor into the entry's memory."""

    def __init__(self, entry: StoredEntry, ledger: Ledger, pool: CopyPool) -> None:
        self.entry_id = entry.entry_id
        self._entry = entry
        self._ledger = ledger
        self._pool = pool
        self.declared = Declared(entry.draft.layout.specs)
        self._indexes = {part.name: i for i, part in enumerate(entry.parts)}

    async def put(self, name: str, tensor: KVMemory) -> None:
        with self.declared.putting(name, spec_put(name, tensor)):
            await self._copy(self._indexes[name], tensor)

    async def _copy(self, index: int, tensor: KVMemory) -> None:
        entry, part = self._entry, self._entry.parts[index]
        if part.region is not None:
            (digest,) = await self._pool.copy(
                [tensor], [place_of(part.region, part.spec)]
            )
            self._ledger.landed(entry, index, digest)
        elif entry.left_by:
            raise EntryAborted(reason=entry.left_by)
        # else it left by being acknowledged early: nobody needs the rest


class LocalStream(SelectStream):
    """Copies each tensor out as it lands. The iteration and ``wait_for`` may mix."""

    def __init__(
        self,
        select: LocalSelect,
        lease: Lease,
        pool: CopyPool,
        targets: Mapping[str, KVMemory],
    ) -> None:
        entry = lease.entry
        match_targets(entry.draft.layout.specs, targets)
        self.entry_id = entry.entry_id
        self.attempt = lease.attempt
        self.matched_tokens = lease.matched_tokens
        self.input_tokens = tensor_of(entry.input_tokens)
        self.roi = tensor_of(entry.roi)
        self.specs: Mapping[str, TensorSpec] = entry.draft.layout.specs
        self._select = select
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
        self._select.wake()

    async def _wait_for_landed(self, count: int) -> None:
        if self._is_closed:
            raise RuntimeError("the stream was left already")
        await self._select.landed(self._lease, count)

    async def _tensor(self, index: int) -> torch.Tensor:
        async with self._copying:
            if index not in self._tensors:
                self._select.check_held(self._lease)
                part = self._lease.entry.parts[index]
                (tensor,) = await tensors_of([part], self._pool, self._targets)
                # Memory of an ended delivery may be somebody else's by now.
                self._select.check_held(self._lease)
                self._tensors[index] = tensor
        return self._tensors[index]


class LocalViews(LocalStream):
    """Shows each tensor where it lies, once it has landed. It keeps none itself."""

    async def _tensor(self, index: int) -> torch.Tensor:
        self._select.check_held(self._lease)
        return view_of(self._lease.entry.parts[index])


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
        return content_digest(draft.layout, digests, draft.input_tokens, draft.roi)

    async def fill(self, entry: StoredEntry, landed: Landed) -> None:
        regions = [part.region for part in entry.parts if part.region is not None]
        if len(regions) != len(self._tensors):
            raise LeaseLost("the entry has left already")
        lent = entry.draft.borrowed
        in_place = {
            index
            for index, region in enumerate(lent)
            if region is not None and region is entry.parts[index].region
        }
        for some in _batches(self._tensors):
            if len(regions) > _BATCH_TENSORS:
                await asyncio.sleep(0)
            if entry.state is EntryState.GONE:
                return  # who inserts it is told why
            targets = {
                index: place_of(regions[index], entry.parts[index].spec)
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
