"""From blocks as another rank had them to blocks as this one has them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch

from asynckv.connectors.caches import REGION_NAMES, BlockMoves
from asynckv.connectors.engine import EntryHeader, KVEngine
from asynckv.connectors.requests import LoadRequest
from asynckv.devices.cuda import Event
from asynckv.errors import IncompatiblePeer
from asynckv.parallel.copies import Span, StridedCopy
from asynckv.parallel.plans import RankRead
from asynckv.tensors.blocks import KVBlocks, KVMemory
from asynckv.tensors.jobs import CopyJob
from asynckv.tensors.resharding import reshard_jobs
from asynckv.tensors.views import dtype_of
from asynckv.types import TensorSpec

__all__ = ("Assembly", "Scratch")


class Scratch:
    """Where one load's layers are put together: in their blocks, if the host can.

    Blocks on a GPU are put together in host memory, and go to the GPU when all sources
    of a layer have come: heads and tokens of several are not scattered one by one.
    """

    def __init__(
        self, moves: BlockMoves, request: LoadRequest, mark: Event | None
    ) -> None:
        self.moves = moves
        self.request = request
        self._mark = mark
        self._tensors: dict[str, list[torch.Tensor]] = {}

    def blocks(self, layer: str) -> list[KVBlocks]:
        """Return the blocks of a layer that are loaded."""
        caches = self.moves.caches
        ids = self.request.block_ids[caches.group_of(layer)]
        return [KVBlocks(region, ids) for region in caches.pools(layer)]

    def landing(self, layer: str) -> Sequence[KVMemory]:
        """Return what parts of a layer are copied into."""
        if not self.moves.is_on_gpu:
            return self.blocks(layer)
        return self._tensors.setdefault(
            layer, [_zeros(one.spec) for one in self.blocks(layer)]
        )

    async def write(self, layer: str, sources: Sequence[torch.Tensor]) -> None:
        """Copy whole blocks of a layer to where they belong.

        A cancelled call no longer touches the blocks; they may hold a part.
        """
        await self.moves.scatter(sources, self.blocks(layer), self._mark)

    async def leave(self, layer: str) -> None:
        """Take a layer to its blocks, all parts of which have landed.

        A cancelled call no longer touches the blocks; they may hold a part.
        """
        if (tensors := self._tensors.get(layer)) is None:
            return
        await self.write(layer, tensors)
        self.moves.pool.free(self._tensors.pop(layer))

    def drop(self) -> None:
        """Forget what did not get to its blocks; nothing is put together any more."""
        for layer in list(self._tensors):
            self.moves.pool.free(self._tensors.pop(layer))


class Assembly:
    """What one source rank's entry has for one load, layer by layer.

    :raises IncompatiblePeer: it is not what the plan was made for, or not enough
    """

    def __init__(
        self,
        engine: KVEngine,
        scratch: Scratch,
        header: EntryHeader,
        read: RankRead | None,
        specs: Mapping[str, TensorSpec],
    ) -> None:
        self._engine, self._scratch = engine, scratch
        self._caches, self._request = scratch.moves.caches, scratch.request
        self._read = read
        expected = None if read is None else read.plan.source
        if header.shape != expected or (
            expected is None and header.block_size != engine.block_size
        ):
            raise IncompatiblePeer(
                f"{header.engine_id} is not shaped as its request said", field="shape"
            )
        self._layers = self._pairs(header)
        self._regions: dict[str, tuple[str, ...]] = {
            source: tuple(
                f"{source}.{name}"
                for name in REGION_NAMES
                if f"{source}.{name}" in specs
            )
            for source in self._layers
        }
        self._check(specs)
        self._copies = self._copies_by_layer()
        self._landed: dict[str, dict[str, torch.Tensor]] = {}
        self._seen: set[str] = set()

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers of this rank that it fills, or a part of each."""
        return tuple(self._layers.values())

    def land(self, name: str, tensor: torch.Tensor) -> str | None:
        """Take a tensor; return the source's layer that is whole by it, if one is.

        :raises IncompatiblePeer: it has come before
        """
        layer = name.rpartition(".")[0]
        if layer not in self._layers or name not in self._regions[layer]:
            return None
        if name in self._seen:
            raise IncompatiblePeer(f"{name} has come twice", field=name)
        self._seen.add(name)
        landed = self._landed.setdefault(layer, {})
        landed[name] = tensor
        return layer if len(landed) == len(self._regions[layer]) else None

    async def place(self, layer: str) -> str:
        """Copy a whole layer into this rank's scratch; return its name here.

        A cancelled call no longer touches the blocks; they may hold a part.
        """
        landed = self._landed.pop(layer)
        target = self._layers[layer]
        sources = [landed[name] for name in self._regions[layer]]
        ids = self._request.block_ids[self._caches.group_of(target)]
        if self._read is None or self._read.plan.is_identity:
            first = self._request.first_block
            await self._scratch.write(
                target, [source[first : first + len(ids)] for source in sources]
            )
        else:
            moves = self._scratch.moves
            sources = await moves.fetch(sources)  # they are taken apart by the host
            await moves.pool.make_and_run(functools.partial(self._jobs, layer, sources))
        return target

    def _jobs(self, layer: str, sources: list[torch.Tensor]) -> list[CopyJob]:
        """Return what takes the heads and tokens of a layer to where they are here."""
        read, request = self._read, self._request
        if read is None:
            raise RuntimeError("whole blocks are not taken apart")
        span = Span(
            tokens=request.num_tokens,
            target_start=request.first_block * self._engine.block_size,
        )
        landing = self._scratch.landing(self._layers[layer])
        try:
            return reshard_jobs(self._copies[layer], sources, landing, span)
        except ValueError as exc:
            raise _misshapen(layer) from exc

    def _pairs(self, header: EntryHeader) -> dict[str, str]:
        """Return which layer there is which one here."""
        read, ours = self._read, self._caches.layers
        if read is not None:
            source, target = read.plan.source.layout, read.plan.target.layout
            if source.is_across_layers != target.is_across_layers:
                raise IncompatiblePeer(
                    "blocks of all layers and blocks of one do not mix", field="layout"
                )
        if read is None or read.plan.source.layout.is_across_layers:
            if set(header.layers) != set(ours):
                raise IncompatiblePeer(
                    f"{header.engine_id} has other layers", field="layers"
                )
            return {layer: layer for layer in header.layers}
        plan = read.plan
        theirs = plan.source.layers_of(read.source.pp)
        mine = plan.target.layers_of(plan.rank.pp)
        if (len(header.layers), len(ours)) != (len(theirs), len(mine)):
            raise IncompatiblePeer(
                f"{header.engine_id} has {len(header.layers)} layers", field="layers"
            )
        return {
            header.layers[layer - theirs[0]]: ours[layer - mine[0]]
            for layer in read.layers
        }

    def _copies_by_layer(self) -> dict[str, tuple[StridedCopy, ...]]:
        read = self._read
        if read is None or read.plan.is_identity:
            return {}
        if read.plan.source.layout.is_across_layers:
            return dict.fromkeys(self._layers, read.copies)
        # A layer apart is cut like every other: one plan of one layer does for all.
        return dict.fromkeys(self._layers, read.copies_of_layer(read.layers[0]))

    def _check(self, specs: Mapping[str, TensorSpec]) -> None:
        """Refuse what lacks a region, or whose elements are not what they are here."""
        is_identity = self._read is None or self._read.plan.is_identity
        for source, target in self._layers.items():
            pools = self._caches.pools(target)
            names = self._regions[source]
            if len(names) != self._regions_there(len(pools)):
                raise _misshapen(source)
            ids = self._request.block_ids[self._caches.group_of(target)]
            here = KVBlocks(pools[0], ()).spec
            for name in names:
                spec = specs[name]
                if spec.dtype != here.dtype:
                    raise IncompatiblePeer(
                        f"{name} is {spec.dtype} there and {here.dtype} here",
                        field="dtype",
                        hint="both engines must have the same cache dtype",
                    )
                if is_identity and (
                    spec.shape[1:] != here.shape[1:]
                    or spec.shape[0] < self._request.first_block + len(ids)
                ):
                    raise _misshapen(name)

    def _regions_there(self, here: int) -> int:
        """Return how many pools a layer has where its blocks come from."""
        if self._read is None:
            return here
        return 2 if self._read.plan.source.layout.split_k_and_v else 1


def _zeros(spec: TensorSpec) -> torch.Tensor:
    """Return what nothing of another request can be seen in."""
    flat = torch.zeros(spec.nbytes, dtype=torch.uint8)
    return flat.view(dtype_of(spec.dtype)).view(spec.shape)


def _misshapen(name: str) -> IncompatiblePeer:
    return IncompatiblePeer(
        f"{name} has not the blocks that were asked for", field=name
    )
