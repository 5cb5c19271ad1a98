"""One request's KV on its way from another rank's blocks into those of this one.

An entry is selected as it lands, where it lies on this GPU; or whole.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from asynckv.abc import SelectStream
from asynckv.connectors.caches import REGION_NAMES, BlockMoves
from asynckv.connectors.connections import identity_of
from asynckv.connectors.engine import (
    HEADER,
    EntryHeader,
    KVEngine,
    NotSaved,
)
from asynckv.connectors.options import ConnectorOptions
from asynckv.connectors.p2p.entries import (
    Source,
    another_prompt,
    are_views,
    is_of,
    open_entry,
)
from asynckv.connectors.p2p.routes import P2PNotifications, P2PRoutes
from asynckv.connectors.requests import LoadRequest, P2PMetadata
from asynckv.connectors.transfers import (
    Transfers,
    TransferState,
)
from asynckv.connectors.worker import Loading
from asynckv.devices.cuda import Event
from asynckv.errors import IncompatiblePeer
from asynckv.observability.lines import as_line
from asynckv.parallel.copies import Span, StridedCopy
from asynckv.parallel.plans import RankRead
from asynckv.tensors.blocks import KVBlocks, KVMemory
from asynckv.tensors.jobs import CopyJob
from asynckv.tensors.resharding import reshard_jobs
from asynckv.tensors.views import dtype_of
from asynckv.types import TensorSpec
from asynckv.waits.waiting import PlainTaskGroup, clear_all_frames

__all__ = (
    "Assembly",
    "P2PLoad",
    "P2PLoading",
    "Scratch",
)


class P2PLoad:
    """Reads the entry of each source rank, and fills the blocks layer by layer.

    An entry that is of no use is acknowledged all the same: its producer shall not
    keep it. One of another prompt is given back: somebody else may be waiting for it.
    """

    def __init__(
        self,
        engine: KVEngine,
        moves: BlockMoves,
        request: LoadRequest,
        timeout_s: float,
    ) -> None:
        self.request = request
        self.nbytes = 0
        self.is_wanted = False
        """Whether another request here loads the same, should this one be aborted."""
        self._untaken: dict[int, Source] = {}
        self._unseen: set[int] = set()
        self._engine, self._caches = engine, moves.caches
        self._scratch = Scratch(moves, request, moves.now())
        self._timeout_s = timeout_s
        self._over = asyncio.Event()
        self._there = {layer: asyncio.Event() for layer in moves.caches.layers}
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
        peer = self.request.peer or identity.rpartition("/")[0]
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
            async with PlainTaskGroup() as group:
                for rank, source in sources.items():
                    group.create_task(self._read(rank, source, reads[rank]))
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
        self._scratch.drop()
        for event in (self._over, *self._there.values()):
            event.set()

    async def wait_for(self, layer: str) -> None:
        """Wait until the layer is there, or never will be.

        One without a cache of its own is there when all are. A cancelled call leaves no
        trace.
        """
        await self._there.get(layer, self._over).wait()

    async def _read(self, rank: int, source: Source, read: RankRead | None) -> None:
        find, entry_id = source
        refusal: IncompatiblePeer | NotSaved | None = None
        has_read = False
        try:
            async with asyncio.timeout(self._timeout_s) as silence:
                buffer = await find()
                async with open_entry(buffer, entry_id) as stream:
                    self._unseen.discard(rank)
                    if not is_of(stream, self.request):
                        del self._untaken[rank]
                        raise another_prompt(stream)
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
        which = f"{as_line(self.request.transfer_id)} of {as_line(self.request.peer)}"
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
        request = self.request
        EntryHeader.check_spec(stream.specs.get(HEADER))
        told = await stream.wait_for(HEADER)
        (told,) = await self._scratch.moves.fetch([told])
        header = EntryHeader.of(told)
        header.check_saved()
        if header.salt != request.salt:
            raise IncompatiblePeer(
                "the entry's prompt has another cache salt, LoRA adapter or images",
                field="salt",
            )
        return Assembly(self._engine, self._scratch, header, read, stream.specs)

    def _landed(self, layer: str) -> None:
        self._missing[layer] -= 1
        if not self._missing[layer]:
            self._there[layer].set()


class P2PLoading(Loading):
    """Begins loads; they fail with the peer that they are from.

    ``moves`` returns how blocks move, and raises if there are none yet. An entry that
    a load has not taken is released. So is what nobody loads: that of a request
    without blocks.
    """

    def __init__(
        self,
        engine: KVEngine,
        options: ConnectorOptions,
        routes: P2PRoutes,
        transfers: Transfers,
        notifications: P2PNotifications,
        *,
        moves: Callable[[], BlockMoves],
    ) -> None:
        super().__init__(transfers)
        self.nbytes = 0
        """Of what was loaded."""
        self._engine, self._options, self._moves = engine, options, moves
        self._routes, self._notifications = routes, notifications
        self._loads: dict[P2PLoad, TransferState] = {}
        self.awaited: tuple[P2PLoad, ...] = ()
        """The loads that the step waits for."""
        if options.direction == "push":
            # What is pulled comes by a link of our own, which fails it by itself.
            routes.call_when_lost(self._on_lost)

    def begin_all(self, step: P2PMetadata) -> None:
        super().begin_all(step)
        for load in self._loads:
            load.is_wanted |= load.request.request_id in step.left_to_others

    def clear(self) -> None:
        """The step is over: it waits for no load any more."""
        self.awaited = ()

    def _begin(self, request: LoadRequest) -> None:
        if not request.block_ids:
            self._notifications.release(request)
            return
        timeout_s = self._options.load_timeout_s
        load = P2PLoad(self._engine, self._moves(), request, timeout_s)
        state = self._transfers.begin(
            request.request_id,
            "recv",
            lambda: self._load(load),
            request.block_ids,
            lambda: self._ended(load),
        )
        if state is None:
            return
        self._loads[load] = state
        if not request.is_async:
            self.awaited += (load,)

    def _on_lost(self, identity: str) -> None:
        """What it was to send will not come.

        Where a request names no peer nobody knows who was to send: others still may.
        """
        for load, state in list(self._loads.items()):
            if not load.request.peer and self._routes.may_come_from_others(identity):
                continue
            rank = load.unseen_rank(identity)
            if rank is not None and not self._routes.has_pushed(load.request, rank):
                reason = f"PeerLost: {as_line(identity)} is gone, or has restarted"
                self._transfers.fail(state, reason)

    def _ended(self, load: P2PLoad) -> None:
        self._loads.pop(load, None)
        load.end()
        # Perhaps its task was cancelled before its first step.
        if not load.has_begun and not load.is_wanted:
            self._notifications.release(load.request)

    async def _load(self, load: P2PLoad) -> None:
        try:
            await load.run(*self._routes.sources(load.request))
        finally:
            self.nbytes += load.nbytes
            if not load.is_wanted:
                self._notifications.release_all(load.request, load.untaken_sources)


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
        self._is_identity = read is None or read.plan.is_identity
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
        self._copies = self._copies_of_a_layer()
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
        if self._is_identity:
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
        request = self._request
        span = Span(
            tokens=request.num_tokens,
            target_start=request.first_block * self._engine.block_size,
        )
        landing = self._scratch.landing(self._layers[layer])
        try:
            return reshard_jobs(self._copies, sources, landing, span)
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

    def _copies_of_a_layer(self) -> tuple[StridedCopy, ...]:
        """Return how a layer is taken apart; nothing, where whole blocks are taken."""
        read = self._read
        if read is None or self._is_identity:
            return ()
        if read.plan.source.layout.is_across_layers:
            return read.copies
        # A layer apart is cut like every other: one plan of one layer does for all.
        return read.copies_of_layer(read.layers[0])

    def _check(self, specs: Mapping[str, TensorSpec]) -> None:
        """Refuse what lacks a region, or whose elements are not what they are here."""
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
                if self._is_identity and (
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
