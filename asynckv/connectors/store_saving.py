"""Which blocks of one rank are on their way to a store, and which had no room."""

from __future__ import annotations

import asyncio
import collections
import functools
import logging
from collections.abc import Coroutine, Iterable
from typing import Any, Final, NamedTuple

import torch

from asynckv.connectors.store_orders import StoreOrder
from asynckv.connectors.store_rank import StoreRank
from asynckv.connectors.store_shapes import SHAPE_KEY, StoredShape
from asynckv.devices.cuda import Event
from asynckv.errors import PeerLost

__all__ = ("StoreSaving",)

_STAGED_BLOCKS: Final = 64
_STAGED_BYTES: Final = 256 * 2**20
_WAIT_S: Final = 0.2
_MOST_CUT: Final = 4096

logger = logging.getLogger(__name__)


class _Save(NamedTuple):
    """A block that is to be stored."""

    order: StoreOrder
    offset: int
    key: str

    @property
    def number(self) -> int:
        """Which of its prompt's blocks it is."""
        return self.order.first_block + self.offset


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
        self._ends: dict[str, int] = {}  # of prompts that are not stored further
        self._staged = 0
        self._has_ended = asyncio.Event()
        self._is_stalled = False
        self._is_told = False

    def bind(self, orders: Iterable[StoreOrder]) -> None:
        """A step begins: these are its saves."""
        self._saves = collections.deque()
        for order in orders:
            if order.first_block <= self._ends.get(order.request_id, -1):
                del self._ends[order.request_id]  # it is begun again before its gap
            for index, key in enumerate(self._rank.keys_of(order)):
                self._saves.append(_Save(order, index, key))

    def clear(self) -> None:
        """The step is over. What is waited for goes on."""
        self._saves = collections.deque()

    def begin_to_wait(self) -> Coroutine[Any, Any, None]:
        """All is computed; return what waits until the step's blocks are copied."""
        return self._wait(self._saves, self._rank.now() if self._saves else None)

    async def _wait(self, saves: collections.deque[_Save], mark: Event | None) -> None:
        until_s = asyncio.get_running_loop().time() + _WAIT_S
        while saves:
            save = saves[0]
            if save.order.request_id in self._ends or not await self._has_room(until_s):
                self._end(save)
                self.skipped += 1
            else:
                block_ids = save.order.block_ids
                value = await self._rank.spool().gather(block_ids, save.offset, mark)
                self._begin(save, value)
            saves.popleft()  # not before: a cancelled call has not saved it

    def _begin(self, save: _Save, value: torch.Tensor) -> None:
        """Store a block beside whatever comes next. Never waits."""
        put = functools.partial(self._put, save, value)
        self._staged += 1
        self._rank.transfers.begin_untold(put, f"put {save.key}")

    async def _has_room(self, until_s: float) -> bool:
        """Whether one more block may be on its way; wait for that, but not for long."""
        most = self._most_staged()
        if self._staged < most:
            return True
        if self._is_stalled:
            return False
        try:
            async with asyncio.timeout_at(until_s):
                while self._staged >= most:
                    self._has_ended.clear()
                    await self._has_ended.wait()
        except TimeoutError:
            self._is_stalled = True
            return False
        return True

    def _most_staged(self) -> int:
        """Return how many blocks may be on their way."""
        return max(_STAGED_BLOCKS, _STAGED_BYTES // self._rank.spool().block_nbytes)

    def _end(self, save: _Save) -> None:
        """The prompt is stored as far as here, at most."""
        request_id = save.order.request_id
        end = self._ends.pop(request_id, save.number)
        self._ends[request_id] = min(end, save.number)
        if len(self._ends) > _MOST_CUT:
            del self._ends[next(iter(self._ends))]

    def _is_behind_a_gap(self, save: _Save) -> bool:
        """Whether one before it is not stored, as it turned out meanwhile."""
        return save.number > self._ends.get(save.order.request_id, save.number)

    async def _put(self, save: _Save, value: torch.Tensor) -> None:
        is_stored = is_skipped = False
        try:
            async with self._rank.at_once:
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
            self._staged -= 1
            self._has_ended.set()
