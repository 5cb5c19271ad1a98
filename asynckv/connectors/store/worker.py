"""The loads and saves of one rank: some blocks of all layers are a value of a store.

Which are on their way, and which had no room.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final, NamedTuple

import torch

from asynckv.abc import KVStoreBuffer
from asynckv.config import KVTransferConfig
from asynckv.connectors.caches import PagedCaches, Staging
from asynckv.connectors.connections import StoreConnection
from asynckv.connectors.engine import (
    SHAPE_KEY,
    KVEngine,
    StoredShape,
    keys_of_ranks,
    namespace_of,
    rank_block_keys,
)
from asynckv.connectors.options import ConnectorOptions
from asynckv.connectors.requests import StoreMetadata, StorePart, StoreRequest
from asynckv.connectors.store.packing import PackedBlocks
from asynckv.connectors.transfers import TransferCounters, Transfers
from asynckv.connectors.worker import CacheWorker, Loading
from asynckv.devices.cuda import Event
from asynckv.devices.lanes import DeviceLanes
from asynckv.errors import ConfigError, EntryAborted, EntryTooLarge, PeerLost
from asynckv.observability.lines import as_line
from asynckv.waits.waiting import PlainTaskGroup

__all__ = (
    "StoreLoading",
    "StoreRank",
    "StoreSaving",
    "StoreWorker",
    "StoreWorkerStatistics",
)


@dataclasses.dataclass(frozen=True)
class StoreRank:
    """One rank of ``engine``, and its ``line`` to a store.

    ``packed`` returns what gathers and scatters blocks, and raises if there are no
    caches yet. ``num_blocks`` are a value. So many values are loaded ``at_once``, and
    as many saved beside them: a save may wait for room that a load gives back, so no
    load waits for a save.
    """

    engine: KVEngine
    options: ConnectorOptions
    line: StoreConnection
    transfers: Transfers
    at_once: int
    _: dataclasses.KW_ONLY
    num_blocks: int
    packed: Callable[[], PackedBlocks]

    async def keys_of(self, request: StoreRequest) -> list[str]:
        """Return the keys of the request's values for this rank, in several turns."""
        ranks = range(self.engine.rank, self.engine.rank + 1)
        return await keys_of_ranks(request.keys, self._namespace, ranks)

    def parts_of(self, request: StoreRequest) -> Iterator[StorePart]:
        """Yield, one by one, where the store has what of the request's blocks.

        :raises ValueError: at once, as :meth:`StoreRequest.parts` does
        """
        return map(self._own, request.parts(self.num_blocks))

    def _own(self, part: StorePart) -> StorePart:
        (key,) = rank_block_keys([part.key], self._namespace, self.engine.rank)
        return part._replace(key=key)

    @property
    def shape(self) -> StoredShape:
        """How this rank's values are cut."""
        return StoredShape.of(self.engine, self.num_blocks * self.engine.block_size)

    @functools.cached_property
    def _namespace(self) -> str:
        return namespace_of(self.engine)


_STAGED_BLOCKS: Final = 64
_STAGED_BYTES: Final = 256 * 2**20
_WAIT_S: Final = 0.2
_MOST_CUT: Final = 4096
_TOLD_S: Final = 10.0

logger = logging.getLogger(__name__)


class _Save(NamedTuple):
    """A value that is to be stored, and whose prompt it is of."""

    prompt: tuple[str, int]
    part: StorePart


class _Saves:
    """Those of one step that have not begun. Each is made when it is the next one."""

    def __init__(self, saves: Iterator[_Save]) -> None:
        self._saves = saves
        self._next: list[_Save] = []

    def next(self) -> _Save | None:
        """Return the next one, if there is any. It is that until it is popped."""
        if not self._next:
            self._next += itertools.islice(self._saves, 1)
        return self._next[0] if self._next else None

    def pop(self) -> None:
        """The next one has begun."""
        self._next.clear()


class StoreSaving:
    """Copies the blocks that a step completes a value of to host memory, and stores
    the copies beside the next steps.

    Nothing of a prompt is sent behind a gap: behind what had no room, or has failed.
    """

    def __init__(self, rank: StoreRank, *, logs_losses: bool = False) -> None:
        """``logs_losses``: nobody else of this engine logs that."""
        self.stored = self.skipped = self.failed = 0
        """How many values came to what."""
        self.nbytes = 0
        """Of those that were stored."""
        self._rank = rank
        self._logs_losses = logs_losses
        self._saves = _Saves(iter(()))
        # Of prompts that are not stored further.
        self._ends: dict[tuple[str, int], int] = {}
        self._staging = Staging(0)
        self._at_once = asyncio.Semaphore(rank.at_once)
        self._is_stalled = False
        self._told_s = -math.inf
        self._is_refused = False

    def bind(self, step: StoreMetadata) -> None:
        """A step begins, with these saves. Never waits."""
        self.clear()
        saves: list[Iterator[_Save]] = []
        for request in step.saves:
            prompt = request.request_id, request.number
            parts = self._rank.parts_of(request)
            first = request.first_block // self._rank.num_blocks
            if request.keys and first <= self._ends.get(prompt, -1):
                del self._ends[prompt]  # it is begun again before its gap
            saves.append(map(functools.partial(_Save, prompt), parts))
        self._saves = _Saves(itertools.chain.from_iterable(saves))

    def clear(self) -> None:
        """The step is over. What is waited for goes on."""
        self._saves = _Saves(iter(()))

    def begin_to_wait(self) -> Coroutine[Any, Any, None]:
        """All is computed; return what waits until the step's blocks are copied."""
        with self._failing(self._saves):
            mark = self._rank.packed().moves.now() if self._saves.next() else None
        return self._wait(self._saves, mark)

    @contextlib.contextmanager
    def _failing(self, saves: _Saves) -> Iterator[None]:
        """With one save that fails those behind it have, and nothing follows them.

        A cancelled one may be waited for again.
        """
        try:
            yield
        except Exception:
            while (save := saves.next()) is not None:
                self._end(save)
                self.failed += 1
                saves.pop()
            raise

    async def _wait(self, saves: _Saves, mark: Event | None) -> None:
        with self._failing(saves):
            await self._copy_all(saves, mark)

    async def _copy_all(self, saves: _Saves, mark: Event | None) -> None:
        until_s = asyncio.get_running_loop().time() + _WAIT_S
        while (save := saves.next()) is not None:
            packed = self._rank.packed()
            nbytes = packed.nbytes
            if save.prompt in self._ends or not await self._takes_room(nbytes, until_s):
                self._end(save)
                self.skipped += 1
            else:
                try:
                    # Kept here under no name: it is large, and freed in a thread.
                    self._begin(save, await packed.gather(save.part.block_ids, mark))
                except BaseException:
                    self._staging.release(nbytes)
                    raise
            saves.pop()  # not before: a cancelled call has not saved it

    def _begin(self, save: _Save, value: torch.Tensor) -> None:
        """Store a value beside whatever comes next. Never waits."""
        put = functools.partial(self._put, save, [value])
        self._rank.transfers.begin_unreported(put, f"put {save.part.key}")

    async def _takes_room(self, nbytes: int, until_s: float) -> bool:
        """Whether one more value may be on its way; wait for that, but not for long."""
        staging = self._staging
        # So many blocks at least, however large they are, and one value.
        num_values = max(1, _STAGED_BLOCKS // self._rank.num_blocks)
        staging.max_bytes = max(_STAGED_BYTES, num_values * nbytes)
        try:
            async with asyncio.timeout_at(until_s):
                while not (is_taken := staging.take(nbytes)) and not self._is_stalled:
                    await staging.more_room.wait()
        except TimeoutError:
            self._is_stalled = True
        return is_taken

    def _end(self, save: _Save) -> None:
        """The prompt is stored as far as here, at most."""
        end = self._ends.pop(save.prompt, save.part.number)
        self._ends[save.prompt] = min(end, save.part.number)
        if len(self._ends) > _MOST_CUT:
            del self._ends[next(iter(self._ends))]

    def _is_behind_a_gap(self, save: _Save) -> bool:
        """Whether one before it is not stored, as it turned out meanwhile."""
        return save.part.number > self._ends.get(save.prompt, save.part.number)

    async def _put(self, save: _Save, values: list[torch.Tensor]) -> None:
        """Store a value, the only one in the list, which is empty soon after."""
        nbytes = values[0].nbytes
        try:
            async with self._at_once:
                store = await self._rank.line.store()
                if self._is_behind_a_gap(save):
                    self._end(save)
                    self.skipped += 1
                    return
                async with asyncio.timeout(self._rank.options.save_timeout_s):
                    await self._tell_shape(store)
                    await store.put(save.part.key, values[0])
            self.stored += 1
            self.nbytes += nbytes
            self._is_stalled = False
            if self._logs_losses:
                self._rank.line.note_answer()
        except BaseException as exc:
            self._end(save)
            self.failed += 1
            if self._logs_losses and isinstance(exc, (PeerLost, TimeoutError)):
                why = str(exc) or "it has not stored a value within save_timeout_s"
                self._rank.line.note_lost(why)
            if isinstance(exc, EntryTooLarge):
                self._note_refused(exc)
            raise
        finally:
            self._staging.release(nbytes)
            self._rank.packed().moves.pool.free(values)

    async def _tell_shape(self, store: KVStoreBuffer) -> None:
        """Say how values are cut, and again later: who clears a store deletes that."""
        now_s = time.monotonic()
        if now_s - self._told_s > _TOLD_S:
            await store.put(SHAPE_KEY, self._rank.shape.tensor())
            self._told_s = now_s

    def _note_refused(self, error: EntryTooLarge) -> None:
        """Say in the log that values are too large for the store, once."""
        if not self._is_refused:
            self._is_refused = True
            logger.warning(
                "nothing is stored at %s: %s (a smaller chunk_tokens makes smaller "
                "values)",
                *(self._rank.line.url, as_line(str(error))),
            )


_BLOCKS_AT_ONCE: Final = 16
_LEAST_VALUES_AT_ONCE: Final = 4
"""So many of one rank are asked for, and sent, at the most; of large ones this few."""


class StoreLoading(Loading):
    """Begins loads. A value that is not stored any more fails all of its load."""

    def __init__(self, rank: StoreRank) -> None:
        super().__init__(rank.transfers)
        self.blocks = self.nbytes = 0
        """How many blocks were loaded, and how much came from the store for that."""
        self._rank = rank
        self._at_once = asyncio.Semaphore(rank.at_once)
        self._turn = asyncio.Lock()
        """Of the load that begins with its values: the next one begins after that."""

    def _begin(self, request: StoreRequest) -> None:
        packed = self._rank.packed()
        load = functools.partial(self.load, request, packed, packed.moves.now())
        self._transfers.begin(request.request_id, "recv", load, request.block_ids)

    def clear(self) -> None:
        """Loads happen between steps."""

    async def load(
        self, request: StoreRequest, packed: PackedBlocks, mark: Event | None = None
    ) -> None:
        """Load these blocks. A cancelled call no longer writes to them.

        :raises EntryAborted: a value is not stored any more
        :raises PeerLost: nobody is there
        :raises TimeoutError: it took longer than ``load_timeout_s``
        """
        parts = self._rank.parts_of(request)
        async with asyncio.timeout(self._rank.options.load_timeout_s):
            keys = await self._rank.keys_of(request)
            store = await self._rank.line.store()
            async with store.pin(keys) as found:
                if not all(found):
                    raise EntryAborted(
                        f"{found.count(False)} of {len(found)} values are not stored "
                        "any more",
                        reason="evicted",
                    )
                async with PlainTaskGroup() as group, self._turn:
                    for part in parts:
                        await self._at_once.acquire()
                        task = group.create_task(
                            self._load_part(store, part, packed, mark)
                        )
                        task.add_done_callback(lambda _: self._at_once.release())

    async def _load_part(
        self,
        store: KVStoreBuffer,
        part: StorePart,
        packed: PackedBlocks,
        mark: Event | None,
    ) -> None:
        value = await store.get(part.key)
        if value is None:
            raise EntryAborted("a value is not stored any more", reason="deleted")
        held = [value]
        del value  # it is large, and freed in a thread
        try:
            await packed.scatter(held[0], part.block_ids, part.first, mark)
        finally:
            packed.moves.pool.free(held)
        self.blocks += packed.num_blocks - part.first
        self.nbytes += packed.nbytes


@dataclasses.dataclass(frozen=True)
class StoreWorkerStatistics:
    """One rank's transfers.

    ``unsaved_blocks`` were not saved, as the store failed, or as it is slow, or for a
    gap before them: the latter two are ``skipped_blocks``. ``loaded_bytes`` came from
    the store; of a value of which only some blocks are loaded that is all of it.
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
    their way, or one larger value, it waits for room: 0.2 s a step, and not at all for
    a store that has stored nothing since it was waited for in vain. What then has no
    room is skipped, and of the same prompt all that follows: nothing is sent behind a
    gap that is known.

    :raises ConfigError: as ``StoreScheduler`` does
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
        self._line = self._connections = StoreConnection(
            config, engine, store, str(engine.rank)
        )
        self._packed: PackedBlocks | None = None
        num_blocks = self.options.chunk_of(engine.block_size) // engine.block_size
        at_once = max(_LEAST_VALUES_AT_ONCE, _BLOCKS_AT_ONCE // num_blocks)
        rank = StoreRank(
            *(engine, self.options, self._line, self._transfers),
            at_once,
            num_blocks=num_blocks,
            packed=self._packed_blocks,
        )
        self._num_blocks = num_blocks
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
        """Blocks are saved with all their layers: in :meth:`wait_for_save`."""
        self._check_loop()

    async def flush(self) -> None:
        """Wait until everything that was saved is stored, or could not be.

        A cancelled call leaves no trace.
        """
        self._check_loop()
        await self._transfers.wait_others()

    def statistics(self) -> StoreWorkerStatistics:
        transfers, saving = self._transfers, self._saving
        num_blocks = self._num_blocks
        return StoreWorkerStatistics(
            loading=transfers.count("recv"),
            saving=transfers.others,
            loaded_blocks=self._loading.blocks,
            saved_blocks=saving.stored * num_blocks,
            skipped_blocks=saving.skipped * num_blocks,
            unsaved_blocks=(saving.skipped + saving.failed) * num_blocks,
            loaded_bytes=self._loading.nbytes,
            saved_bytes=saving.nbytes,
            links=int(self._line.is_connected),
            transfers=dataclasses.replace(transfers.counters),
        )

    def _register(self, caches: PagedCaches) -> None:
        super()._register(caches)
        packed = PackedBlocks(self._registered(), self._num_blocks)
        if packed.nbytes > self.config.max_bytes:
            raise ConfigError(
                f"the KV of a chunk of {self._num_blocks * self.engine.block_size} "
                f"tokens takes {packed.nbytes} bytes of a rank, and at most "
                f"{self.config.max_bytes} are received at a time",
                hint="make chunk_tokens smaller, or kv_buffer_size larger (inside vLLM "
                "max_bytes)",
            )
        self._packed = packed

    def _packed_blocks(self) -> PackedBlocks:
        if self._packed is None:
            raise RuntimeError("register_kv_caches() comes first")
        return self._packed
