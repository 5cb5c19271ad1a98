"""One prompt's KV on its way out of the blocks of one rank, layer by layer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from typing import Any, Final

import torch

from asynckv.abc import InsertWriter
from asynckv.connectors.caches import BlockMoves, StagedCopy, Staging
from asynckv.connectors.engine import HEADER, EntryHeader, KVEngine
from asynckv.connectors.options import ConnectorOptions
from asynckv.connectors.p2p.entries import (
    Target,
)
from asynckv.connectors.p2p.gpu_layers import GpuLayers
from asynckv.connectors.p2p.routes import P2PNotifications, P2PRoutes
from asynckv.connectors.requests import SaveRequest
from asynckv.connectors.transfers import Transfers, TransferState, reason_of
from asynckv.devices.cuda import Event
from asynckv.errors import EntryConflict, GPUFailed
from asynckv.observability.lines import as_line
from asynckv.tensors.blocks import KVBlocks
from asynckv.types import TensorSpec

__all__ = (
    "BlockRelease",
    "P2PSave",
    "P2PSaving",
)


logger = logging.getLogger(__name__)


class P2PSave:
    """Puts each layer into one entry or more, as soon as it is computed.

    The blocks are read until :attr:`released` is set; what was staged before goes on
    from its copy. Blocks on a GPU are put from copies alone: on that GPU, where
    something leads from there to a target (``may_lead_to_gpu``), else in ``staging``,
    as which each layer comes to the host once, however many targets there are. Where
    the target ``is_on_their_gpu`` they are put as blocks of the host are.
    """

    def __init__(
        self,
        moves: BlockMoves,
        request: SaveRequest,
        header: EntryHeader,
        ttl_s: float,
        *,
        staging: Staging | None = None,
        is_local: bool = False,
        is_on_their_gpu: bool = False,
        may_lead_to_gpu: bool = False,
    ) -> None:
        self.request = request
        self._nbytes = 0
        self.released = asyncio.Event()
        self.must_release = False
        self.is_wanted = True
        self._moves = moves
        self._caches = caches = moves.caches
        self._header = header
        self._ttl_s = ttl_s
        self._is_local = is_local
        self._offered: list[str] = []
        self._queues: list[asyncio.Queue[str]] = []
        self._not_admitted = 1
        self._unread = dict.fromkeys(caches.layers, 1)
        self._readings: set[asyncio.Timeout] = set()
        self._copy: StagedCopy | None = None
        self._on_gpu: GpuLayers | None = None
        self._marks: dict[str, Event | None] = {}
        self._last_mark: Event | None = None
        if moves.is_on_gpu and not is_on_their_gpu:
            self._on_gpu = GpuLayers(
                *(moves, staging or Staging(0), self._blocks, self._recheck),
                by_host=not may_lead_to_gpu,
            )

    @property
    def nbytes(self) -> int:
        """Of what was put."""
        return self._nbytes if self._on_gpu is None else self._on_gpu.nbytes

    @property
    def is_copying(self) -> bool:
        """Whether it waits for nobody any more, but for memory of this process."""
        if self._on_gpu is None:
            return self._is_local and not self._not_admitted
        if self._on_gpu.wait_for_nobody:
            return True
        return not (self._not_admitted or self._on_gpu.wait_for_room)

    def lacks_room(self) -> bool:
        """Whether it waits for room in this process."""
        waits = self._on_gpu is not None and self._on_gpu.wait_for_room
        return self._is_local and (self._not_admitted > 0 or waits)

    def offer(self, layer: str, mark: Event | None = None) -> None:
        """The layer is computed at ``mark``: copy it soon. Never waits.

        Again is nothing.
        """
        if layer not in self._caches.layers or layer in self._offered:
            return
        self._offered.append(layer)
        self._marks[layer] = self._last_mark = mark
        if self._on_gpu is not None:
            self._on_gpu.offer(layer, mark)
        for queue in self._queues:
            queue.put_nowait(layer)

    def offer_rest(self, mark: Event | None = None) -> None:
        """All layers are computed at ``mark``."""
        for layer in self._caches.layers:
            self.offer(layer, mark)

    async def run(self, targets: Sequence[Target]) -> None:
        """Save it all.

        When it ends, in whatever way, the blocks are no longer read; then an entry
        that is not whole is no entry.
        """
        self._not_admitted = len(targets)
        self._unread = dict.fromkeys(self._caches.layers, len(targets))
        if self._on_gpu is not None:
            self._on_gpu.begin(len(targets))
        if not targets:
            return
        try:
            async with asyncio.TaskGroup() as group:
                if self._on_gpu is not None:
                    group.create_task(self._on_gpu.run())
                writes = [
                    group.create_task(self._write(target, self._new_queue()))
                    for target in targets
                ]
                await asyncio.wait(writes)
                if self._on_gpu is not None:
                    self._on_gpu.finish()
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def stage(self, staging: Staging) -> bool:
        """Copy what is not put yet, so that the save goes on from there.

        ``False``: there is no room for that. All layers must have been offered. It
        may be called again. A cancelled call leaves no trace, and reads no block.
        """
        if self._copy is not None or self.released.is_set():
            return True
        if self._on_gpu is not None:
            self._on_gpu.move_to_host()
            return False  # it is being done, if there is room
        unread = [layer for layer, count in self._unread.items() if count]
        blocks = {layer: self._blocks(layer) for layer in unread}
        copy = await staging.copy(blocks, self._moves, self._last_mark)
        if copy is None:
            return False
        if self.released.is_set():
            copy.drop()
            return True
        self._copy = copy
        for layer in unread:
            if not self._unread[layer]:
                copy.drop(layer)
        for reading in self._readings:
            reading.reschedule(asyncio.get_running_loop().time())
        self._recheck()
        return True

    def stop_waiting(self) -> None:
        """No step waits any longer for room in staging. Never waits."""
        if self._on_gpu is not None:
            self._on_gpu.stop_waiting()

    def end(self) -> None:
        """It has ended, in whatever way. Never waits."""
        self.released.set()
        if self._copy is not None:
            self._copy.drop()
        if self._on_gpu is not None:
            self._on_gpu.drop()

    def _new_queue(self) -> asyncio.Queue[str]:
        queue: asyncio.Queue[str] = asyncio.Queue()
        for layer in self._offered:
            queue.put_nowait(layer)
        self._queues.append(queue)
        return queue

    def _blocks(self, layer: str) -> dict[str, KVBlocks]:
        return self._caches.blocks(layer, self.request.block_ids)

    def _recheck(self) -> None:
        """See whether the blocks are still read, or will be."""
        if self._on_gpu is not None:
            is_read = self._on_gpu.are_read
        else:
            is_copied = self._copy is not None and not self._readings
            is_read = not is_copied and any(self._unread.values())
        if not is_read:
            self.released.set()

    async def _write(self, target: Target, queue: asyncio.Queue[str]) -> None:
        find, entry_id, deliveries = target
        request, header = self.request, self._header.tensor()
        buffer = await find()
        async with buffer.open_insert(
            torch.tensor(request.token_ids, dtype=torch.int64),
            None,
            {
                HEADER: TensorSpec(tuple(header.shape), "uint8"),
                **self._caches.specs(request.block_ids),
            },
            entry_id=entry_id,
            ttl_s=self._ttl_s,
            deliveries=deliveries,
        ) as writer:
            if self._on_gpu is None:
                self._not_admitted -= 1
            await writer.put(HEADER, header)
            if self._on_gpu is not None:
                self._not_admitted -= 1  # from here on it copies, whatever a peer does
                await self._on_gpu.put(writer, queue)
                return
            for _ in self._caches.layers:
                layer = await queue.get()
                for name, memory in self._blocks(layer).items():
                    await self._put(writer, layer, name, memory)
                    self._nbytes += memory.nbytes
                self._layer_put(layer)

    async def _put(
        self, writer: InsertWriter, layer: str, name: str, blocks: KVBlocks
    ) -> None:
        """Put one tensor from where it lies; from its copy, once there is one."""
        if self._copy is None:
            try:
                # It is ended by `stage`: by then there is a copy.
                async with asyncio.timeout(None) as reading:
                    self._readings.add(reading)
                    try:
                        await self._moves.reached(self._marks[layer])
                        await writer.put(name, blocks)
                    finally:
                        self._readings.discard(reading)
                return
            except TimeoutError:
                if not reading.expired():
                    raise
            finally:
                self._recheck()
        copy = self._copy
        if copy is None:
            raise RuntimeError("a put was ended, and there is no copy")
        await writer.put(name, copy.tensor(layer, name))

    def _layer_put(self, layer: str) -> None:
        self._unread[layer] -= 1
        if not self._unread[layer] and self._copy is not None:
            self._copy.drop(layer)
        self._recheck()


_FROM_BLOCKS_S: Final = 0.05
_STEP_S: Final = 0.2
_TOO_LATE: Final = (
    f"its blocks were not free {_STEP_S:g} s after its step: it had no room where it "
    "goes, or no way there, and could not be staged"
)


class BlockRelease:
    """Waits for no peer longer than a step can bear.

    For 50 ms saves go on from the blocks. What is not put then is copied to staging,
    if there is room, and goes on from there. What has no such room after 0.2 s fails.
    A save into this process's own buffer that has room there waits for nobody: it is
    let finish. So is one of blocks on a GPU, which is copied to staging from the first,
    or to memory of that GPU once its target has room, while there is some. ``hang_up``
    ends the links that a save goes over.
    """

    def __init__(self, transfers: Transfers, staging: Staging) -> None:
        self._transfers, self._staging = transfers, staging
        self._wanted = asyncio.Event()
        self.late = 0

    def want(self) -> None:
        """Some of the saves that are let finish must leave now. Never waits."""
        self._wanted.set()
        self._wanted = asyncio.Event()

    async def release_when_wanted(
        self,
        saves: Mapping[TransferState, P2PSave],
        hang_up: Callable[[SaveRequest], None],
    ) -> None:
        """As :meth:`release`, but let saves finish that need not leave."""
        while busy := {
            state: s for state, s in saves.items() if not s.released.is_set()
        }:
            if leaving := {state: s for state, s in busy.items() if s.must_release}:
                await self.release(leaving, hang_up)
                continue
            ends = asyncio.create_task(_wait_released(busy, None))
            wanted = asyncio.create_task(self._wanted.wait())
            try:
                await asyncio.wait((ends, wanted), return_when=asyncio.FIRST_COMPLETED)
            finally:
                ends.cancel()
                wanted.cancel()

    async def release(
        self,
        saves: Mapping[TransferState, P2PSave],
        hang_up: Callable[[SaveRequest], None],
    ) -> None:
        """Return when no block of these saves is read any more.

        A cancelled call leaves the saves as they are.
        """
        for pause_s in (_FROM_BLOCKS_S, _STEP_S - _FROM_BLOCKS_S):
            await _wait_released(saves, pause_s)
            for save in _busy(saves).values():
                await self._stage(save)
        await _wait_released(_busy(saves), _FROM_BLOCKS_S)
        late = _busy(saves)
        for save in saves.values():
            save.stop_waiting()
        for state, save in late.items():
            self.late += 1
            self._transfers.fail(state, _TOO_LATE, lacks_room=save.lacks_room())
        await _wait_released(late, _FROM_BLOCKS_S)
        for save in _busy(late).values():
            hang_up(save.request)  # whoever reads blocks for it shall let go of them
        await _wait_released(saves, None)

    async def _stage(self, save: P2PSave) -> None:
        """Copy it, if that can be done: else its blocks are read on, and it fails."""
        try:
            await save.stage(self._staging)
        except Exception:
            # Whatever it is: the step must still wait until the others read no block.
            request = as_line(save.request.request_id)
            logger.exception("the save of %s could not be staged", request)


def _busy(saves: Mapping[TransferState, P2PSave]) -> dict[TransferState, P2PSave]:
    """Return those whose blocks are read, and that may wait for somebody."""
    return {
        state: save
        for state, save in saves.items()
        if not save.released.is_set() and not save.is_copying
    }


async def _wait_released(
    saves: Mapping[TransferState, P2PSave], timeout_s: float | None
) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            for save in saves.values():
                await save.released.wait()
    except TimeoutError:
        pass


class P2PSaving:
    """Begins saves, tells them of layers, and waits until they read no block.

    ``moves`` returns how blocks move, and raises if there are none yet. One that failed
    leaves an entry that says why.
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
        staging: Staging,
    ) -> None:
        self.nbytes = 0
        """Of what was saved."""
        self.engine, self.options, self._moves = engine, options, moves
        self._routes, self._transfers, self._notifications = (
            routes,
            transfers,
            notifications,
        )
        self._staging = staging
        self._releasing = BlockRelease(transfers, staging)
        self._saves: dict[TransferState, P2PSave] = {}
        self._held: dict[TransferState, P2PSave] = {}
        self._under_way: dict[tuple[str, str], P2PSave] = {}

    @property
    def late(self) -> int:
        """How many were given up, as there was no room for them."""
        return self._releasing.late

    def begin(self, request: SaveRequest) -> None:
        """Begin to listen for layers, or tell who waits why not. Never waits."""
        if request.refusal:
            if request.is_named:
                self._notifications.report_failure(
                    request, self._header_of(request), request.refusal
                )
            return
        if self._routes.is_full:
            reason = "there is no room here (kv_buffer_size, or max_bytes)"
            self._transfers.refuse(
                request.request_id, "send", (), reason, lacks_room=True
            )
            self._notifications.report_failure(
                request, self._header_of(request), reason
            )
            return
        save = self.new_save(request)
        state: TransferState | None = None
        state = self._transfers.begin(
            request.request_id,
            "send",
            lambda: self._save(save),
            ended=lambda: self._save_ended(save, state),
        )
        if state is not None:
            self._saves[state] = save
            self._under_way[_name_of(request)] = save
        elif not self._transfers.is_closing:  # then nobody is told any more
            reason = "an older save of that request has not ended"
            self._notifications.report_failure(
                request, self._header_of(request), reason
            )

    def withdraw(self, request: SaveRequest) -> None:
        """Nobody will ask for what that saves, or has saved. Never waits."""
        save = self._under_way.get(_name_of(request))
        if save is None:
            self._notifications.withdraw(request)
        else:
            save.is_wanted = False

    def new_save(self, request: SaveRequest) -> P2PSave:
        """Return one that nobody runs yet."""
        moves = self._moves()
        buffer = self._routes.buffer if self.options.direction == "pull" else None
        return P2PSave(
            moves,
            request,
            self._header_of(request),
            self.options.ttl_s,
            staging=self._staging,
            is_local=buffer is not None,
            is_on_their_gpu=buffer is not None and moves.fit(buffer.device),
            may_lead_to_gpu=self._routes.may_lead_to_gpu(
                request, str(moves.caches.device)
            ),
        )

    def offer(self, layer: str) -> None:
        """The layer is computed where the engine's stream is now. Never waits.

        :raises GPUFailed: where that is cannot be known
        """
        if self._saves:
            mark = self._moves().now()
            for save in self._saves.values():
                save.offer(layer, mark)

    def begin_to_wait(self) -> Coroutine[Any, Any, None]:
        """All layers are computed; return what waits until no block is read."""
        saves = dict(self._saves)
        try:
            mark = self._moves().now() if saves else None
        except GPUFailed as exc:
            return self._give_up(saves, exc)
        return self._wait(saves, mark)

    def let_go_of_blocks(self, request_ids: Set[str] | None) -> None:
        """The engine wants the blocks of these requests, or of all. Never waits."""
        for save in self._held.values():
            if request_ids is None or save.request.request_id in request_ids:
                save.must_release = True
        self._releasing.want()

    def clear(self) -> None:
        """The step is over: nothing more is said of its layers."""
        self._saves.clear()

    async def _wait(
        self, saves: dict[TransferState, P2PSave], mark: Event | None
    ) -> None:
        for state, save in saves.items():
            save.offer_rest(mark)
            timeout_s = self.options.save_timeout_s
            self._transfers.fail_after(state, timeout_s, lacks_room=save.lacks_room)
        if self.engine.holds_saved_blocks:
            self._held |= saves
            try:
                await self._releasing.release_when_wanted(saves, self._routes.hang_up)
            finally:
                for state in saves:
                    self._held.pop(state, None)
        else:
            await self._releasing.release(saves, self._routes.hang_up)

    async def _give_up(
        self, saves: dict[TransferState, P2PSave], error: GPUFailed
    ) -> None:
        """Fail them: when their layers are computed cannot be known."""
        for state in saves:
            self._transfers.fail(state, reason_of(error))
        for save in saves.values():
            await save.released.wait()
        raise error

    def _header_of(self, request: SaveRequest) -> EntryHeader:
        return EntryHeader(
            engine_id=self.engine.engine_id,
            rank=self.engine.rank,
            block_size=self.engine.block_size,
            layers=self._moves().caches.layers,
            shape=self.engine.shape,
            salt=request.salt,
        )

    def _save_ended(self, save: P2PSave, state: TransferState | None) -> None:
        save.end()
        if state is not None:
            self._under_way.pop(_name_of(save.request), None)
        if not save.is_wanted:
            self._notifications.withdraw(save.request)
        elif state is not None and state.reason:
            header = self._header_of(save.request)
            self._notifications.report_failure(save.request, header, state.reason)

    async def _save(self, save: P2PSave) -> None:
        was_reported = False
        try:
            if self._routes.peers.device is not None and self._routes.pushes:
                # The caches may have come after start(): before a peer is dialled.
                await self._moves().open_if_possible()
            was_reported = await self._notifications.take_back_report(save.request)
            await save.run(self._routes.targets(save.request))
            self._notifications.forget_report(save.request)
        except EntryConflict:
            failed = was_reported or self._notifications.has_reported(save.request)
            if failed or self.options.direction == "push":
                raise  # what is there, or was taken, may say that it has failed
            # Another request of that transfer saves it, or has: it is there once.
        finally:
            self.nbytes += save.nbytes


def _name_of(request: SaveRequest) -> tuple[str, str]:
    return request.request_id, request.transfer_id
