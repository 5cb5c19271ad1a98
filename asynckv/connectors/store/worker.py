"""The loads and saves of one rank: blocks of all layers, as one value each in a store.

Which are on their way, and which had no room.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import hashlib
import logging
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Sequence,
)
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy
import numpy.typing
import torch

from asynckv.abc import BlockIds, KVStoreBuffer
from asynckv.config import KVTransferConfig
from asynckv.connectors.caches import BlockMoves, PagedCaches, Staging
from asynckv.connectors.connections import StoreConnection
from asynckv.connectors.engine import (
    SHAPE_KEY,
    KVEngine,
    StoredShape,
    namespace_of,
    rank_block_keys,
)
from asynckv.connectors.options import ConnectorOptions
from asynckv.connectors.requests import StoreMetadata, StoreRequest
from asynckv.connectors.transfers import (
    TransferCounters,
    Transfers,
    flat,
)
from asynckv.connectors.worker import CacheWorker, Loading
from asynckv.devices.cuda import Event
from asynckv.devices.lanes import DeviceLanes
from asynckv.devices.tensors import gpu_of
from asynckv.errors import EntryAborted, PeerLost
from asynckv.tensors.blocks import KVBlocks, extent_of
from asynckv.tensors.jobs import CopyJob
from asynckv.tensors.views import bytes_of
from asynckv.waits.own_tasks import PlainTaskGroup

__all__ = (
    "BLOCKS_AT_ONCE",
    "PackedBlocks",
    "StoreLoading",
    "StoreRank",
    "StoreSaving",
    "StoreWorker",
    "StoreWorkerStatistics",
)

_MARK_NBYTES: Final = 64
"""The digest's. What follows it is aligned for every dtype."""
_PIECE_NBYTES: Final = 2**20


_Into: TypeAlias = Literal["value", "blocks"]
_Bytes: TypeAlias = numpy.typing.NDArray[numpy.uint8]


class _HostPool(NamedTuple):
    """One pool of blocks in host memory, and where one of them begins in a value."""

    group: int
    memory: _Bytes
    num_blocks: int
    step: int
    block_nbytes: int
    start: int


class _HostCopy(CopyJob):
    """One block of every pool, copied to the value they make up, or from it.

    :raises IndexError: there is no block of that id
    """

    def __init__(
        self, pools: Sequence[_HostPool], ids: Sequence[int], value: _Bytes, into: _Into
    ) -> None:
        for pool in pools:
            if not 0 <= ids[pool.group] < pool.num_blocks:
                raise IndexError(f"a pool has {pool.num_blocks} blocks: no such id")
        self._pools, self._ids, self._value = pools, ids, value
        self._is_gathering = into == "value"

    @property
    def nbytes(self) -> int:
        return len(self._value) - _MARK_NBYTES

    def steps(self) -> Generator[None, None, None]:
        copied = 0
        for pool in self._pools:
            first, nbytes = self._ids[pool.group] * pool.step, pool.block_nbytes
            block = pool.memory[first : first + nbytes]
            part = self._value[pool.start : pool.start + nbytes]
            if self._is_gathering:
                part[:] = block
            else:
                block[:] = part
            copied += nbytes
            if copied >= _PIECE_NBYTES:
                copied = 0
                yield


class PackedBlocks:
    """Gathers a block from every layer's pools, and scatters it into them.

    What a block is in bytes is the order of the layers, and of the pools of each,
    after a digest of what these are: their names, dtypes and shapes.
    """

    def __init__(self, moves: BlockMoves) -> None:
        caches = moves.caches
        self.moves = moves
        pools = [
            (layer, pool) for layer in caches.layers for pool in caches.pools(layer)
        ]
        none = [(layer, KVBlocks(pool, ())) for layer, pool in pools]
        told = [(layer, one.spec.dtype, one.spec.shape[1:]) for layer, one in none]
        digest = hashlib.blake2b(msgspec.msgpack.encode(told), digest_size=_MARK_NBYTES)
        self._mark = digest.digest()
        self._pools: list[tuple[int, KVBlocks, int]] = []
        """The group of each, none of its blocks, and where one begins in a value."""
        self.block_nbytes = _MARK_NBYTES
        for layer, one in none:
            self._pools.append((caches.group_of(layer), one, self.block_nbytes))
            self.block_nbytes += one.block_nbytes
        self._host = None if moves.is_on_gpu else list(self._in_host_memory())
        kinds = {(one.dtype, one.shape[1:]) for _, one in none}
        self._kind = kinds.pop() if len(kinds) == 1 else None
        """What all are, if that is the same."""

    async def gather(
        self, block_ids: BlockIds, index: int, mark: Event | None = None
    ) -> torch.Tensor:
        """Return the bytes of the blocks at ``index`` of each group, as at ``mark``.

        A cancelled call no longer reads the blocks.
        """
        value = torch.empty(self.block_nbytes, dtype=torch.uint8)
        memory = bytes_of(value)
        memory[:_MARK_NBYTES] = self._mark
        if self._host is not None:
            await self._copy_on_host(memory, block_ids, index, "value")
            return value
        parts = self._parts(value, block_ids, index)
        await self.moves.gather(
            [blocks for blocks, _ in parts], [part for _, part in parts], mark
        )
        return value

    async def scatter(
        self,
        value: torch.Tensor,
        block_ids: BlockIds,
        index: int,
        mark: Event | None = None,
    ) -> None:
        """Put the bytes of one value into the blocks at ``index`` of each group.

        The value is in host memory, or on the GPU of the blocks, and ready there.
        A cancelled call no longer writes to the blocks; they may hold a part.

        :raises ValueError: it is no value of these caches
        """
        if value.dtype != torch.uint8 or value.nbytes != self.block_nbytes:
            raise ValueError(
                f"a value of {value.nbytes} bytes is no block of {self.block_nbytes}"
            )
        (told,) = await self.moves.fetch([value[:_MARK_NBYTES]])
        if bytes_of(told).tobytes() != self._mark:
            raise ValueError("a value of other layers, or of another dtype or layout")
        if self._host is not None:
            await self._copy_on_host(bytes_of(value), block_ids, index, "blocks")
            return
        parts = self._parts(value, block_ids, index)
        await self.moves.scatter(
            [part for _, part in parts], [blocks for blocks, _ in parts], mark
        )

    def _in_host_memory(self) -> Iterator[_HostPool]:
        for group, none, start in self._pools:
            pool, nbytes = none.pool, none.block_nbytes
            memory = numpy.frombuffer(extent_of(pool), numpy.uint8)
            step = pool.stride(0) * pool.element_size()
            yield _HostPool(group, memory, len(pool), step, nbytes, start)

    async def _copy_on_host(
        self,
        value: memoryview,
        block_ids: BlockIds,
        index: int,
        into: _Into,
    ) -> None:
        ids = [int(group[index]) for group in block_ids]
        array = numpy.frombuffer(value, numpy.uint8)
        await self.moves.pool.run([_HostCopy(self._host or (), ids, array, into)])

    def _parts(
        self, value: torch.Tensor, block_ids: BlockIds, index: int
    ) -> Sequence[tuple[KVBlocks, torch.Tensor]]:
        spans = self._spans(block_ids, index)
        if gpu_of(value) is None:
            bytes_of(value)  # it is plain memory, whoever made it
        if self._kind is not None:  # a hundred layers one by one take a millisecond
            dtype, shape = self._kind
            typed = value[_MARK_NBYTES:].view(dtype).view(len(spans), 1, *shape)
            return [(blocks, typed[i]) for i, (blocks, _) in enumerate(spans)]
        parts = []
        for blocks, start in spans:
            part = value[start : start + blocks.nbytes]
            parts.append((blocks, part.view(blocks.dtype).view(blocks.shape)))
        return parts

    def _spans(self, block_ids: BlockIds, index: int) -> Sequence[tuple[KVBlocks, int]]:
        """Return the blocks, and where in a value each begins."""
        ids = [int(group[index]) for group in block_ids]
        return [(none.at(ids[group]), start) for group, none, start in self._pools]


@dataclasses.dataclass(frozen=True)
class StoreRank:
    """One rank of ``engine``, and its ``line`` to a store.

    ``packed`` returns what gathers and scatters blocks, and raises if there are no
    caches yet. So many blocks are loaded ``at_once``, and as many saved beside them:
    a save may wait for room that a load gives back, so no load waits for a save.
    """

    engine: KVEngine
    options: ConnectorOptions
    line: StoreConnection
    transfers: Transfers
    at_once: int
    _: dataclasses.KW_ONLY
    packed: Callable[[], PackedBlocks]

    def keys_of(self, request: StoreRequest) -> list[str]:
        """Return where the store has this rank's part of the request's blocks."""
        return rank_block_keys(request.block_keys, self._namespace, self.engine.rank)

    @functools.cached_property
    def _namespace(self) -> str:
        return namespace_of(self.engine)


_STAGED_BLOCKS: Final = 64
_STAGED_BYTES: Final = 256 * 2**20
_WAIT_S: Final = 0.2
_MOST_CUT: Final = 4096

logger = logging.getLogger(__name__)


class _Save(NamedTuple):
    """A block that is to be stored."""

    request: StoreRequest
    offset: int
    key: str

    @property
    def number(self) -> int:
        """Which of its prompt's blocks it is."""
        return self.request.first_block + self.offset

    @property
    def prompt(self) -> tuple[str, int]:
        """Whose prompt it is of."""
        return _prompt_of(self.request)


def _prompt_of(request: StoreRequest) -> tuple[str, int]:
    return request.request_id, request.number


class StoreSaving:
    """Copies the blocks of a step to host memory, and stores the copies beside the
    next steps.

    Nothing of a prompt is sent behind a gap: behind what had no room, or has failed.
    """

    def __init__(self, rank: StoreRank, *, logs_losses: bool = False) -> None:
        """``logs_losses``: nobody else of this engine logs that."""
        self.stored = self.skipped = self.failed = 0
        """How many blocks came to what."""
        self._rank = rank
        self._logs_losses = logs_losses
        self._saves: collections.deque[_Save] = collections.deque()
        # Of prompts that are not stored further.
        self._ends: dict[tuple[str, int], int] = {}
        self._staging = Staging(0)
        self._at_once = asyncio.Semaphore(rank.at_once)
        self._is_stalled = False
        self._is_told = False

    def bind(self, step: StoreMetadata) -> None:
        """A step begins, with these saves. Never waits."""
        self._saves = collections.deque()
        for request in step.saves:
            if request.first_block <= self._ends.get(_prompt_of(request), -1):
                del self._ends[_prompt_of(request)]  # it is begun again before its gap
            for index, key in enumerate(self._rank.keys_of(request)):
                self._saves.append(_Save(request, index, key))

    def clear(self) -> None:
        """The step is over. What is waited for goes on."""
        self._saves = collections.deque()

    def begin_to_wait(self) -> Coroutine[Any, Any, None]:
        """All is computed; return what waits until the step's blocks are copied."""
        mark = self._rank.packed().moves.now() if self._saves else None
        return self._wait(self._saves, mark)

    async def _wait(self, saves: collections.deque[_Save], mark: Event | None) -> None:
        until_s = asyncio.get_running_loop().time() + _WAIT_S
        while saves:
            save = saves[0]
            packed = self._rank.packed()
            nbytes = packed.block_nbytes
            if save.prompt in self._ends or not await self._takes_room(nbytes, until_s):
                self._end(save)
                self.skipped += 1
            else:
                try:
                    block_ids = save.request.block_ids
                    value = await packed.gather(block_ids, save.offset, mark)
                except BaseException:
                    self._staging.release(nbytes)
                    raise
                self._begin(save, value)
            saves.popleft()  # not before: a cancelled call has not saved it

    def _begin(self, save: _Save, value: torch.Tensor) -> None:
        """Store a block beside whatever comes next. Never waits."""
        put = functools.partial(self._put, save, value)
        self._rank.transfers.begin_unreported(put, f"put {save.key}")

    async def _takes_room(self, nbytes: int, until_s: float) -> bool:
        """Whether one more block may be on its way; wait for that, but not for long."""
        staging = self._staging
        # So many blocks at least, however large they are.
        staging.max_bytes = max(_STAGED_BYTES, _STAGED_BLOCKS * nbytes)
        try:
            async with asyncio.timeout_at(until_s):
                while not (is_taken := staging.take(nbytes)) and not self._is_stalled:
                    await staging.more_room.wait()
        except TimeoutError:
            self._is_stalled = True
        return is_taken

    def _end(self, save: _Save) -> None:
        """The prompt is stored as far as here, at most."""
        end = self._ends.pop(save.prompt, save.number)
        self._ends[save.prompt] = min(end, save.number)
        if len(self._ends) > _MOST_CUT:
            del self._ends[next(iter(self._ends))]

    def _is_behind_a_gap(self, save: _Save) -> bool:
        """Whether one before it is not stored, as it turned out meanwhile."""
        return save.number > self._ends.get(save.prompt, save.number)

    async def _put(self, save: _Save, value: torch.Tensor) -> None:
        is_stored = is_skipped = False
        try:
            async with self._at_once:
                store = await self._rank.line.store()
                if self._is_behind_a_gap(save):
                    is_skipped = True
                    return
                async with asyncio.timeout(self._rank.options.save_timeout_s):
                    if not self._is_told:
                        shape = StoredShape.of(self._rank.engine)
                        await store.put(SHAPE_KEY, shape.tensor())
                        self._is_told = True
                    await store.put(save.key, value)
            is_stored = True
            self._is_stalled = False
            if self._logs_losses:
                self._rank.line.note_answer()
        except BaseException as exc:
            if self._logs_losses and isinstance(exc, (PeerLost, TimeoutError)):
                why = str(exc) or "it has not stored a block within save_timeout_s"
                self._rank.line.note_lost(why)
            raise
        finally:
            self.stored += is_stored
            self.skipped += is_skipped
            self.failed += not is_stored and not is_skipped
            if not is_stored:
                self._end(save)
            self._staging.release(value.nbytes)


BLOCKS_AT_ONCE: Final = 16
"""So many blocks of one rank are asked for, and sent, at the most."""


class StoreLoading(Loading):
    """Begins loads. A block that is not stored any more fails all of its load."""

    def __init__(self, rank: StoreRank) -> None:
        super().__init__(rank.transfers)
        self.blocks = 0
        """How many were loaded."""
        self._rank = rank
        self._at_once = asyncio.Semaphore(rank.at_once)

    def _begin(self, request: StoreRequest) -> None:
        packed = self._rank.packed()
        load = functools.partial(self.load, request, packed, packed.moves.now())
        blocks = flat(request.block_ids)
        self._transfers.begin(request.request_id, "recv", load, blocks)

    def clear(self) -> None:
        """Loads happen between steps."""

    async def load(
        self, request: StoreRequest, packed: PackedBlocks, mark: Event | None = None
    ) -> None:
        """Load these blocks. A cancelled call no longer writes to them.

        :raises EntryAborted: a block is not stored any more
        :raises PeerLost: nobody is there
        :raises TimeoutError: it took longer than ``load_timeout_s``
        """
        keys = self._rank.keys_of(request)
        async with asyncio.timeout(self._rank.options.load_timeout_s):
            store = await self._rank.line.store()
            async with store.pin(keys) as found:
                if not all(found):
                    raise EntryAborted(
                        f"{found.count(False)} of {len(keys)} blocks are not stored "
                        "any more",
                        reason="evicted",
                    )
                async with PlainTaskGroup() as group:
                    for index, key in enumerate(keys):
                        scatter = functools.partial(
                            packed.scatter,
                            block_ids=request.block_ids,
                            index=index,
                            mark=mark,
                        )
                        group.create_task(self._load_block(store, key, scatter))

    async def _load_block(
        self,
        store: KVStoreBuffer,
        key: str,
        scatter: Callable[[torch.Tensor], Awaitable[None]],
    ) -> None:
        async with self._at_once:
            value = await store.get(key)
            if value is None:
                raise EntryAborted("a block is not stored any more", reason="deleted")
            await scatter(value)
            self.blocks += 1


@dataclasses.dataclass(frozen=True)
class StoreWorkerStatistics:
    """One rank's transfers.

    ``unsaved_blocks`` were not saved, as the store failed, or as it is slow, or for a
    gap before them: the latter two are ``skipped_blocks``.
    """

    loading: int
    saving: int
    loaded_blocks: int
    saved_blocks: int
    skipped_blocks: int
    unsaved_blocks: int
    loaded_bytes: int
    saved_bytes: int
    links: int
    transfers: TransferCounters


class StoreWorker(CacheWorker):
    """Loads and saves what :class:`~asynckv.connectors.StoreScheduler` decides.

    ``wait_for_save`` waits until blocks are copied to host memory, not until they are
    stored: that goes on beside the next steps. While 64 blocks, and 256 MiB, are on
    their way it waits for room: 0.2 s a step, and not at all for a store that has
    stored nothing since it was waited for in vain. What then has no room is skipped,
    and of the same prompt all that follows: nothing is sent behind a gap that is known.
    """

    metadata_type = StoreMetadata

    def __init__(
        self,
        config: KVTransferConfig,
        engine: KVEngine,
        store: KVStoreBuffer | None = None,
        *,
        lanes: DeviceLanes | None = None,
    ) -> None:
        super().__init__(config, engine, lanes=lanes)
        self._line = StoreConnection(config, engine, store, str(engine.rank))
        self._packed: PackedBlocks | None = None
        rank = StoreRank(
            *(engine, self.options, self._line, self._transfers),
            BLOCKS_AT_ONCE,
            packed=self._packed_blocks,
        )
        self._loading: StoreLoading = StoreLoading(rank)
        tells = not config.is_kv_consumer and engine.rank == 0
        self._saving: StoreSaving = StoreSaving(rank, logs_losses=tells)

    async def start(self) -> None:
        """Nothing to open: the store is dialled when it is needed."""
        self._check_loop()

    async def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads happen between steps: there is nothing to wait for."""
        self._check_loop()

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor | None = None,
        attn_metadata: object = None,
        **kwargs: object,
    ) -> None:
        """A block is saved whole, with all its layers: in :meth:`wait_for_save`."""
        self._check_loop()

    async def flush(self) -> None:
        """Wait until everything that was saved is stored, or could not be.

        A cancelled call leaves no trace.
        """
        self._check_loop()
        await self._transfers.wait_others()

    def statistics(self) -> StoreWorkerStatistics:
        transfers, saving = self._transfers, self._saving
        block_nbytes = 0 if self._packed is None else self._packed.block_nbytes
        return StoreWorkerStatistics(
            loading=transfers.count("recv"),
            saving=transfers.others,
            loaded_blocks=self._loading.blocks,
            saved_blocks=saving.stored,
            skipped_blocks=saving.skipped,
            unsaved_blocks=saving.skipped + saving.failed,
            loaded_bytes=self._loading.blocks * block_nbytes,
            saved_bytes=saving.stored * block_nbytes,
            links=int(self._line.is_connected),
            transfers=dataclasses.replace(transfers.counters),
        )

    @property
    def _connections(self) -> StoreConnection:
        return self._line

    def _register(self, caches: PagedCaches) -> None:
        super()._register(caches)
        self._packed = PackedBlocks(self._registered())

    def _packed_blocks(self) -> PackedBlocks:
        if self._packed is None:
            raise RuntimeError("register_kv_caches() comes first")
        return self._packed
