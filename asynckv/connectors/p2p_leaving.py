"""How the blocks of saves are left alone before the next step overwrites them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from asynckv.connectors.lifecycle import Life
from asynckv.connectors.p2p_orders import SaveOrder
from asynckv.connectors.p2p_saves import P2PSave
from asynckv.connectors.staging import Staging
from asynckv.connectors.transfers import Transfers
from asynckv.observability.lines import as_line

__all__ = ("P2PLeaving",)

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
