"""The saves of one rank: begun, told of layers, and out of their blocks in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Set
from typing import Any, Final

from asynckv.connectors.caches import BlockMoves, Staging
from asynckv.connectors.engine import EntryHeader, KVEngine
from asynckv.connectors.options import ConnectorOptions
from asynckv.connectors.p2p.routes import P2PNotifications, P2PRoutes
from asynckv.connectors.p2p.save import P2PSave, SavePath
from asynckv.connectors.requests import P2PMetadata, SaveRequest
from asynckv.connectors.transfers import Transfers, TransferState, reason_of
from asynckv.devices.cuda import Event
from asynckv.errors import EntryConflict, GPUFailed

__all__ = ("BlockRelease", "P2PSaving")

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

    def __init__(
        self, transfers: Transfers, hang_up: Callable[[SaveRequest], None]
    ) -> None:
        self._transfers, self._hang_up = transfers, hang_up
        self._wanted = asyncio.Event()
        self.late = 0

    def want(self) -> None:
        """Some of the saves that are let finish must leave now. Never waits."""
        self._wanted.set()
        self._wanted = asyncio.Event()

    async def release_when_wanted(self, saves: Mapping[TransferState, P2PSave]) -> None:
        """As :meth:`release`, but let saves finish that need not leave."""
        while busy := {
            state: s for state, s in saves.items() if not s.released.is_set()
        }:
            if leaving := {state: s for state, s in busy.items() if s.must_release}:
                await self.release(leaving)
                continue
            ends = asyncio.create_task(_wait_released(busy, None))
            wanted = asyncio.create_task(self._wanted.wait())
            try:
                await asyncio.wait((ends, wanted), return_when=asyncio.FIRST_COMPLETED)
            finally:
                ends.cancel()
                wanted.cancel()

    async def release(self, saves: Mapping[TransferState, P2PSave]) -> None:
        """Return when no block of these saves is read any more.

        A cancelled call leaves the saves as they are.
        """
        for pause_s in (_FROM_BLOCKS_S, _STEP_S - _FROM_BLOCKS_S):
            await _wait_released(saves, pause_s)
            for save in _busy(saves).values():
                save.move_to_host()
        await _wait_released(_busy(saves), _FROM_BLOCKS_S)
        late = _busy(saves)
        for save in saves.values():
            save.stop_waiting()
        await self._end(saves, late)

    async def _end(
        self,
        saves: Mapping[TransferState, P2PSave],
        late: Mapping[TransferState, P2PSave],
    ) -> None:
        """Fail what is late, and hang up on who reads it still, until all are released.

        Those too whose copy is there only now, and who are read all the same.
        """
        failed, hung_up = set[TransferState](), set[TransferState]()
        while True:
            for state, save in late.items():
                if state not in failed:
                    failed.add(state)
                    self.late += 1
                    self._transfers.fail(state, _TOO_LATE, lacks_room=save.lacks_room())
                elif state not in hung_up:
                    hung_up.add(state)
                    self._hang_up(save.request)
            busy = _busy(saves)
            await _wait_released(saves, _FROM_BLOCKS_S)
            if all(save.released.is_set() for save in saves.values()):
                return
            late = {one: save for one, save in _busy(saves).items() if one in busy}


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
        self._releasing = BlockRelease(transfers, routes.hang_up)
        self._saves: dict[TransferState, P2PSave] = {}
        self._held: dict[TransferState, P2PSave] = {}
        self._under_way: dict[tuple[str, str], P2PSave] = {}

    @property
    def late(self) -> int:
        """How many were given up, as there was no room for them."""
        return self._releasing.late

    def bind(self, step: P2PMetadata) -> None:
        """A step begins, with these saves, and withdrawals. Never waits."""
        for request in step.saves:
            self.begin(request)
        for request in step.withdrawals:
            self.withdraw(request)

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
        moves, path = self._moves(), SavePath.LEND
        buffer = self._routes.buffer if self.options.direction == "pull" else None
        if moves.is_on_gpu and not (buffer is not None and moves.fit(buffer.device)):
            gpu = str(moves.caches.device)
            leads_there = self._routes.may_lead_to_gpu(request, gpu)
            path = SavePath.GPU if leads_there else SavePath.HOST
        return P2PSave(
            *(moves, request, self._header_of(request)),
            *(self.options.ttl_s, self._staging),
            path=path,
            is_local=buffer is not None,
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
                await self._releasing.release_when_wanted(saves)
            finally:
                for state in saves:
                    self._held.pop(state, None)
        else:
            await self._releasing.release(saves)

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
        request, was_reported = save.request, False

        async def prepare() -> None:
            nonlocal was_reported
            if self._routes.peers.device is not None and self._routes.pushes:
                # The caches may have come after start(): before a peer is dialled.
                await self._moves().open_if_possible()
            was_reported = await self._notifications.take_back_report(request)

        try:
            await save.run(self._routes.targets(request), prepare=prepare)
            self._notifications.forget_report(request)
        except EntryConflict:
            failed = was_reported or self._notifications.has_reported(request)
            if failed or self.options.direction == "push":
                raise  # what is there, or was taken, may say that it has failed
            # Another request of that transfer saves it, or has: it is there once.
        finally:
            self.nbytes += save.nbytes


def _name_of(request: SaveRequest) -> tuple[str, str]:
    return request.request_id, request.transfer_id
