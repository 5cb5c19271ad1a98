"""Which saves of one rank are under way, and which its step waits for.

Their blocks are left alone before the next step overwrites them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Set
from typing import Any, Final

from asynckv.connectors.caches import BlockMoves
from asynckv.connectors.engine import KVEngine
from asynckv.connectors.keys import EntryHeader
from asynckv.connectors.options import ConnectorOptions
from asynckv.connectors.p2p.gpu_layers import Staging
from asynckv.connectors.p2p.routes import P2PNotifications, P2PRoutes
from asynckv.connectors.p2p.save import P2PSave
from asynckv.connectors.requests import SaveOrder
from asynckv.connectors.transfers import Life, Transfers, reason_of
from asynckv.devices.cuda import Event
from asynckv.errors import EntryConflict, GPUFailed
from asynckv.observability.lines import as_line

__all__ = (
    "P2PLeaving",
    "P2PSaving",
)


logger = logging.getLogger(__name__)

_FROM_BLOCKS_S: Final = 0.05
_STEP_S: Final = 0.2
_TOO_LATE: Final = (
    f"its blocks were not free {_STEP_S:g} s after its step: it had no room where it "
    "goes, or no way there, and could not be staged"
)


class P2PLeaving:
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

    async def leave_when_wanted(
        self, saves: Mapping[Life, P2PSave], hang_up: Callable[[SaveOrder], None]
    ) -> None:
        """As :meth:`leave`, but let saves finish that need not leave."""
        while busy := {life: s for life, s in saves.items() if not s.quiet.is_set()}:
            if leaving := {life: s for life, s in busy.items() if s.must_leave}:
                await self.leave(leaving, hang_up)
                continue
            ends = asyncio.create_task(_wait_quiet(busy, None))
            wanted = asyncio.create_task(self._wanted.wait())
            try:
                await asyncio.wait((ends, wanted), return_when=asyncio.FIRST_COMPLETED)
            finally:
                ends.cancel()
                wanted.cancel()

    async def leave(
        self, saves: Mapping[Life, P2PSave], hang_up: Callable[[SaveOrder], None]
    ) -> None:
        """Return when no block of these saves is read any more.

        A cancelled call leaves the saves as they are.
        """
        for pause_s in (_FROM_BLOCKS_S, _STEP_S - _FROM_BLOCKS_S):
            await _wait_quiet(saves, pause_s)
            for save in _busy(saves).values():
                await self._stage(save)
        await _wait_quiet(_busy(saves), _FROM_BLOCKS_S)
        late = _busy(saves)
        for save in saves.values():
            save.hurry()
        for life, save in late.items():
            self.late += 1
            self._transfers.fail(life, _TOO_LATE, lacks_room=save.lacks_room())
        await _wait_quiet(late, _FROM_BLOCKS_S)
        for save in _busy(late).values():
            hang_up(save.order)  # whoever reads blocks for it shall let go of them
        await _wait_quiet(saves, None)

    async def _stage(self, save: P2PSave) -> None:
        """Copy it, if that can be done: else its blocks are read on, and it fails."""
        try:
            await save.stage(self._staging)
        except Exception:
            # Whatever it is: the step must still wait until the others read no block.
            request = as_line(save.order.request_id)
            logger.exception("the save of %s could not be staged", request)


def _busy(saves: Mapping[Life, P2PSave]) -> dict[Life, P2PSave]:
    """Return those whose blocks are read, and that may wait for somebody."""
    return {
        life: save
        for life, save in saves.items()
        if not save.quiet.is_set() and not save.is_copying
    }


async def _wait_quiet(saves: Mapping[Life, P2PSave], timeout_s: float | None) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            for save in saves.values():
                await save.quiet.wait()
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
        notices: P2PNotifications,
        *,
        moves: Callable[[], BlockMoves],
        staging: Staging,
    ) -> None:
        self.nbytes = 0
        """Of what was saved."""
        self.engine, self.options, self._moves = engine, options, moves
        self._routes, self._transfers, self._notices = routes, transfers, notices
        self._staging = staging
        self._leaving = P2PLeaving(transfers, staging)
        self._saves: dict[Life, P2PSave] = {}
        self._held: dict[Life, P2PSave] = {}
        self._under_way: dict[tuple[str, str], P2PSave] = {}

    @property
    def late(self) -> int:
        """How many were given up, as there was no room for them."""
        return self._leaving.late

    def begin(self, order: SaveOrder) -> None:
        """Begin to listen for layers, or tell who waits why not. Never waits."""
        if order.refusal:
            if order.is_named:
                self._notices.report_failure(
                    order, self._header_of(order), order.refusal
                )
            return
        if self._routes.is_full:
            reason = "there is no room here (kv_buffer_size, or max_bytes)"
            self._transfers.refuse(
                order.request_id, "send", (), reason, lacks_room=True
            )
            self._notices.report_failure(order, self._header_of(order), reason)
            return
        save = self.new_save(order)
        life: Life | None = self._transfers.begin(
            order.request_id,
            "send",
            lambda: self._save(save),
            ended=lambda: self._save_ended(save, life),
        )
        if life is None:
            reason = "an older save of that request has not ended"
            self._notices.report_failure(order, self._header_of(order), reason)
        else:
            self._saves[life] = save
            self._under_way[_name_of(order)] = save

    def withdraw(self, order: SaveOrder) -> None:
        """Nobody will ask for what that saves, or has saved. Never waits."""
        save = self._under_way.get(_name_of(order))
        if save is None:
            self._notices.withdraw(order)
        else:
            save.is_wanted = False

    def new_save(self, order: SaveOrder) -> P2PSave:
        """Return one that nobody runs yet."""
        moves = self._moves()
        buffer = self._routes.buffer if self.options.direction == "pull" else None
        return P2PSave(
            moves,
            order,
            self._header_of(order),
            self.options.ttl_s,
            staging=self._staging,
            is_local=buffer is not None,
            is_on_their_gpu=buffer is not None and moves.fit(buffer.device),
            may_lead_to_gpu=self._routes.may_lead_to_gpu(
                order, str(moves.caches.device)
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
            if request_ids is None or save.order.request_id in request_ids:
                save.must_leave = True
        self._leaving.want()

    def clear(self) -> None:
        """The step is over: nothing more is said of its layers."""
        self._saves.clear()

    async def _wait(self, saves: dict[Life, P2PSave], mark: Event | None) -> None:
        for life, save in saves.items():
            save.offer_rest(mark)
            timeout_s = self.options.save_timeout_s
            self._transfers.fail_after(life, timeout_s, lacks_room=save.lacks_room)
        if self.engine.holds_saved_blocks:
            self._held |= saves
            try:
                await self._leaving.leave_when_wanted(saves, self._routes.hang_up)
            finally:
                for life in saves:
                    self._held.pop(life, None)
        else:
            await self._leaving.leave(saves, self._routes.hang_up)

    async def _give_up(self, saves: dict[Life, P2PSave], error: GPUFailed) -> None:
        """Fail them: when their layers are computed cannot be known."""
        for life in saves:
            self._transfers.fail(life, reason_of(error))
        for save in saves.values():
            await save.quiet.wait()
        raise error

    def _header_of(self, order: SaveOrder) -> EntryHeader:
        return EntryHeader(
            engine_id=self.engine.engine_id,
            rank=self.engine.rank,
            block_size=self.engine.block_size,
            layers=self._moves().caches.layers,
            shape=self.engine.shape,
            salt=order.salt,
        )

    def _save_ended(self, save: P2PSave, life: Life | None) -> None:
        save.end()
        if life is not None:
            self._under_way.pop(_name_of(save.order), None)
        if not save.is_wanted:
            self._notices.withdraw(save.order)
        elif life is not None and life.reason:
            header = self._header_of(save.order)
            self._notices.report_failure(save.order, header, life.reason)

    async def _save(self, save: P2PSave) -> None:
        try:
            if self._routes.peers.device is not None and self._routes.pushes:
                # The caches may have come after start(): before a peer is dialled.
                await self._moves().open_if_possible()
            await save.run(self._routes.targets(save.order))
        except EntryConflict:
            if self.options.direction == "push":
                raise
            # Another request of that transfer saves it, or has: it is there once.
        finally:
            self.nbytes += save.nbytes


def _name_of(order: SaveOrder) -> tuple[str, str]:
    return order.request_id, order.transfer_id
