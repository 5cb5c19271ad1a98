"""Blocks that were found in a store, and stay there until they are loaded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from asynckv.abc import KVStoreBuffer
from asynckv.errors import AsyncKVError, PeerLost
from asynckv.shielding import wait_shielded

__all__ = ("StoreHolds",)

logger = logging.getLogger(__name__)


class StoreHolds:
    """Pins what is found for ``seconds``: not evicted before its load can pin it.

    Of more than ``at_most`` at once the oldest are let go.
    """

    def __init__(self, seconds: float, at_most: int) -> None:
        self._seconds = seconds
        self._at_most = at_most
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._is_closing = False

    def __len__(self) -> int:
        """How many there are."""
        return len(self._tasks)

    async def hold(self, store: KVStoreBuffer, keys: Sequence[str]) -> tuple[bool, ...]:
        """Say which of ``keys`` are there; those stay. A cancelled call holds none.

        :raises PeerLost: the store is gone
        """
        loop = asyncio.get_running_loop()
        found: asyncio.Future[tuple[bool, ...]] = loop.create_future()
        task = loop.create_task(
            self._keep(store, keys, found), name="asynckv: blocks that were found"
        )
        self._tasks[task] = None
        task.add_done_callback(lambda task: self._ended(task, found))
        if self._is_closing or len(self._tasks) > self._at_most:
            next(iter(self._tasks)).cancel()
        try:
            return await found
        except asyncio.CancelledError:
            task.cancel()
            await wait_shielded(task)
            raise

    async def let_go(self) -> None:
        """Let all go. A cancellation is held back until then."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await wait_shielded(asyncio.gather(*tasks, return_exceptions=True))

    async def aclose(self) -> None:
        """Let all go, and hold nothing more. A cancellation is held back until then."""
        self._is_closing = True
        await self.let_go()

    def abort(self) -> None:
        """Let all go soon, and hold nothing more. Never waits."""
        self._is_closing = True
        for task in self._tasks:
            task.cancel()

    async def _keep(
        self,
        store: KVStoreBuffer,
        keys: Sequence[str],
        found: asyncio.Future[tuple[bool, ...]],
    ) -> None:
        try:
            async with store.pin(keys) as there:
                if not found.done():
                    found.set_result(there)
                    await asyncio.sleep(self._seconds)
        except (AsyncKVError, OSError) as exc:
            if not found.done():
                found.set_exception(exc)
            else:
                logger.debug("what was found is held no longer: %s", exc)

    def _ended(
        self, task: asyncio.Task[None], found: asyncio.Future[tuple[bool, ...]]
    ) -> None:
        del self._tasks[task]
        if not found.done():  # it was cancelled before it had asked
            found.set_exception(PeerLost("what is found is not held any more"))
